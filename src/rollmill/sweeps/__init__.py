"""Sweeps: trainings with different values of options, each an ordinary run, several at a time."""
