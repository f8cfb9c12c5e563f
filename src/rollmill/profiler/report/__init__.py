"""Reports of a profile: as text, as a page, and as a trace for Perfetto, and two profiles side by side."""
