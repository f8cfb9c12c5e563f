"""Adapters of other packages' environments, one file each, imported on demand."""
