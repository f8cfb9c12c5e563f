"""The computations that kernels perform, for any backend: rollouts, gradients of a minibatch, and epochs.

Each has a reference that runs the same program with JAX functions.
"""
