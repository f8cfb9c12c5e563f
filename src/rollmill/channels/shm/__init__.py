"""Channels through shared memory, between processes of one host or threads of one process."""
