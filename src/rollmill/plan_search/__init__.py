"""Searches for the fastest way to run a training, by short trainings in processes of their own."""
