"""Brokers: which names the ends of channels have, and where the other end is."""
