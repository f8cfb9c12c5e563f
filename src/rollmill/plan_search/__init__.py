"""Searches for the fastest plan of a run, by short runs in separate processes."""
