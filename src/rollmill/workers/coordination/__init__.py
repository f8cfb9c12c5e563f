"""The coordinator of a training with workers: jobs, snapshots, stops and recovery."""
