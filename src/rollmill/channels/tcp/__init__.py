"""Channels between hosts, over TCP."""
