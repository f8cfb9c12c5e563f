"""Trainings in several processes: the replicas of a partition's groups, and their coordinator."""
