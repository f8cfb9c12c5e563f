"""Workers on several hosts: a Ray cluster places, names and ends them, and tells of their death.

All else stays as it is with processes of one host: the supervisor decides who is replaced, heartbeats and messages
go over its own connections, and channels carry the same packages, through TCP. Between hosts, Ray carries only the
jobs.
"""
