"""Profiles a run: alternates windows with and without the JAX profiler, and turns them into a `Profile`."""
