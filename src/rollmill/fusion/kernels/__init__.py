"""The computations of kernels, for any backend: rollouts, gradients of a minibatch, and epochs.

Each has a reference that runs the same program by JAX functions.
"""
