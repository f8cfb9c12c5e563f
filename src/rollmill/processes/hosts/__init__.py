"""Workers of processes that a batch system started, one on each host, all with the same command."""
