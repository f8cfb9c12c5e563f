"""Divides GPUs among several processes: by MPS, by MIG slices, or in turns."""
