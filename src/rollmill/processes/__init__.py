"""Worker processes on one host: starting them, talking with them, seeing them fail, and ending them.

Nothing here knows what the workers do. What passes between processes is JSON and raw arrays. Nothing is
unpickled or evaluated.
"""
