"""A page in the browser of all runs and sweeps of a folder, behind a server for this user alone."""
