"""Starts workers through processes that a batch system has started, one on each host, with the same command."""
