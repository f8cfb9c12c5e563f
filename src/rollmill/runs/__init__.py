"""Runs on disk: the names and the configuration of a training, its identity, trust in it, and its changes."""
