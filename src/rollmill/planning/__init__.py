"""Plans a run: distribution policies, placement options, plans as files, and drawings of plans."""
