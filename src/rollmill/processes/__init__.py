"""Starts worker processes, exchanges messages with them, detects their failures, and ends them.

This package does not depend on what the workers compute. Processes exchange JSON and raw arrays, and nothing is
unpickled or evaluated.
"""
