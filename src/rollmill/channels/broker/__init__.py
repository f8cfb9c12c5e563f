"""Brokers, registries through which the two ends of a channel find each other."""
