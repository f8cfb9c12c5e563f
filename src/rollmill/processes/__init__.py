"""Worker processes on one host: starting them, exchanging messages, detecting failures, and ending them.

Nothing here knows the workers' jobs. Processes exchange JSON and raw arrays, and nothing is unpickled or
evaluated.
"""
