"""Coordinates the workers of a run: their jobs, snapshots, stops, and recovery from losses."""
