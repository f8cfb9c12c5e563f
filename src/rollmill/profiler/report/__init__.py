"""Renders profiles for terminals, as pages, as traces for Perfetto, and as comparisons of two profiles."""
