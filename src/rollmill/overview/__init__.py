"""Overviews of the runs and sweeps of a folder, while they train and afterwards."""
