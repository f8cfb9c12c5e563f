"""Kernels for NVIDIA GPUs, as Triton source."""
