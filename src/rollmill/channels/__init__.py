"""Channels, which carry the edges between groups of fragments: queues, latest values, and reductions.

A `Wire` opens the ends of channels by name, through threads, shared memory or TCP. The caller does not see
which. Messages are pytrees of arrays as raw bytes, and both ends know their `Layout` beforehand. Nothing
received from a channel is unpickled or evaluated.
"""
