"""Searches for the fastest plan with functions that judge candidates, without running anything itself.

The caller passes functions that return the memory and the speed of a candidate.
"""
