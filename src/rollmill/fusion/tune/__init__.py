"""Finds the fastest launch of a kernel by timing, once for each kernel and device."""
