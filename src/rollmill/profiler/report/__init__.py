"""Reports of a profile: as text, as a page, as a trace for Perfetto, and as a comparison of two profiles."""
