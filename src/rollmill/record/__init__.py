"""The record of a run: its directory, checkpoints and metrics, and the signals that stop it.

Nothing here depends on algorithms, networks, environments or execution: a state is a pytree of arrays,
a configuration is JSON.
"""
