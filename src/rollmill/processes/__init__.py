"""Starts worker processes, exchanges messages with them, detects their failures, and ends them.

Nothing here knows what the workers compute. Processes exchange JSON and raw arrays, and nothing is unpickled or
evaluated.
"""
