"""Replicas, the running copies of a group: their stages, their connections, and snapshots of their state."""
