"""The record of a run: its directory, checkpoints and metrics, and the signals that stop it.

This package does not depend on algorithms, networks, environments or workers. To it, a training state is a pytree
of arrays, and a configuration is JSON.
"""
