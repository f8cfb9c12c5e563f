"""Channels through shared memory of one host, or of the threads of one process."""
