"""Finds the fastest launch configuration of a kernel by timing, once for each kernel and device."""
