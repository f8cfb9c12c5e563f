"""Overviews of a folder's runs and sweeps, during training and afterwards."""
