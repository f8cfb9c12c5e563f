"""Replicas, the running copies of a group: their roles, their stages, and snapshots of their state."""
