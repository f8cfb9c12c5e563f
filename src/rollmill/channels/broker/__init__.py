"""Brokers: registries of the names, memory and addresses of channel ends."""
