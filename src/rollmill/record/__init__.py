"""The record of a run: its directory, checkpoints and metrics, and the signals that stop it.

This package does not depend on algorithms, networks, environments or workers. It treats the training state as a
pytree of arrays, and the configuration as JSON.
"""
