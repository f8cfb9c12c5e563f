"""Searches for the fastest plan by short runs in separate processes."""
