"""Learning curves of runs and sweeps, as values, as an HTML page, or as a PNG."""
