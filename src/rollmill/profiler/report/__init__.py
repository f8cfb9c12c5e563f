"""Renders profiles as text, as pages, as traces for Perfetto, and as comparisons of two profiles."""
