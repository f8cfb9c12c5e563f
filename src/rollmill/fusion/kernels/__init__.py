"""The computations that kernels perform, for any backend: rollouts, gradients of a minibatch, and epochs.

Each computation has a reference, which runs the same program with JAX functions.
"""
