"""Mutually authenticated connections between processes, used by channels and workers."""
