"""Instances: the parts of a GPU that several processes have, by MPS, as slices of MIG, or in turns."""
