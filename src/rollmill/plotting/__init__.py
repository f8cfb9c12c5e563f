"""Learning curves of runs and sweeps: as values, as a page, and as a PNG."""
