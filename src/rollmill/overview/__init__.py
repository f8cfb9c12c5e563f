"""Overviews of a folder's runs and sweeps, while they train and afterwards."""
