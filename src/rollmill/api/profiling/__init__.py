"""Profiles a training: windows with and without the profiler take turns, and become a `Profile`."""

from rollmill.api.profiling.profiling import ProfileOptions, profile

__all__ = ["ProfileOptions", "profile"]
