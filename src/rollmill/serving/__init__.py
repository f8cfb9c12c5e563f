"""Serves a trained policy over HTTP on this machine, and computes the requests of many clients in common
batches.
"""

from rollmill.serving.address import LOOPBACK, Address, listen, read_token, url_of
from rollmill.serving.batching import BatchingRule, check_rule
from rollmill.serving.decisions import BatchedPolicy
from rollmill.serving.limits import ServerLimits, allow_descriptors, limits_of
from rollmill.serving.server import Server
from rollmill.serving.statistics import ServerStatistics, bytes_of
from rollmill.serving.workers import READY, run_workers

__all__ = [
    "Address",
    "BatchedPolicy",
    "BatchingRule",
    "LOOPBACK",
    "READY",
    "Server",
    "ServerLimits",
    "ServerStatistics",
    "allow_descriptors",
    "bytes_of",
    "check_rule",
    "limits_of",
    "listen",
    "read_token",
    "run_workers",
    "url_of",
]
