"""Reduces recordings of the JAX profiler to the time of each operation, without the profiler's own cost."""
