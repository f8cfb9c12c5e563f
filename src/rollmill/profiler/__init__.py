"""Profiles a training: windows with and without the profiler take turns, and become a `Profile`."""

from rollmill.profiler.profiling import NothingProfiled, ProfileOptions, ProfilingStopped, profile

__all__ = ["NothingProfiled", "ProfileOptions", "ProfilingStopped", "profile"]
