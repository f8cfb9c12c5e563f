"""Channels, which carry messages between groups of fragments: queues, latest values, and all-reduces.

A `Wire` opens the ends of channels by name, over threads, shared memory or TCP. Callers use all of them in the
same way. Messages are pytrees of arrays as raw bytes, and both ends know their `Layout` beforehand. Nothing
received from a channel is unpickled or evaluated.
"""
