"""Runs training in several workers: the replicas of a partition's groups, and the coordinator that drives them."""
