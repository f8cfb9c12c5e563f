"""Finds the fragment, step and field in which a NaN or infinity first appeared, and replays the faulty step."""
