"""Profiles a run: windows with and without the profiler take turns, and become a `Profile`."""
