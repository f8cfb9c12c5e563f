"""Kernels for NVIDIA's GPUs, in Triton's language."""
