"""Workers on several hosts of a Ray cluster, which places them, ends them, and reports their death.

Everything else works as with processes of one host. The supervisor decides who is replaced, heartbeats and
messages use its own connections, and channels carry the same data over TCP. Between hosts, Ray carries only the
jobs.
"""
