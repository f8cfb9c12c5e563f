"""The work of kernels, for any backend: a rollout, the gradients of a minibatch, and epochs of them.

Each has a reference, which runs the same program by JAX's own functions.
"""
