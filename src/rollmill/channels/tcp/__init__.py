"""Channels between hosts."""
