"""The coordinator of all workers: jobs, snapshots, stops and recovery."""
