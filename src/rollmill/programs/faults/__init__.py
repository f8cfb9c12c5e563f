"""Finds the fragment, step and field of a NaN, and replays the iteration that it was saved in."""
