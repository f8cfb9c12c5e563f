"""Sweeps: ordinary runs with different options, several at a time."""
