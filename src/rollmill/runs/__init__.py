"""Runs on disk: names, configuration, identity, trust and changes of hyperparameters."""
