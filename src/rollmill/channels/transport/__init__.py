"""Mutually authenticated connections, used by channels and workers."""
