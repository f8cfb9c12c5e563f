"""Connections with mutual authentication, which channels and workers are reached by."""
