"""Sweeps: ordinary runs with different option values, several at a time."""
