"""Kernels for CPUs: machine code by LLVM."""
