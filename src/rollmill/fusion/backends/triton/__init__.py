"""Kernels for NVIDIA GPUs, generated as Triton source."""
