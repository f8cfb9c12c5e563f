"""Serves a trained policy over HTTP on this machine, and answers the requests of many clients in batches."""

from rollmill.serving.address import (
    LOOPBACK as LOOPBACK,
    Address as Address,
    listen as listen,
    read_token as read_token,
    url_of as url_of,
)
from rollmill.serving.batching import BatchingRule as BatchingRule, check_rule as check_rule
from rollmill.serving.decisions import BatchedPolicy as BatchedPolicy
from rollmill.serving.limits import (
    ServerLimits as ServerLimits,
    allow_descriptors as allow_descriptors,
    limits_of as limits_of,
)
from rollmill.serving.server import Server as Server
from rollmill.serving.statistics import ServerStatistics as ServerStatistics, bytes_of as bytes_of
from rollmill.serving.workers import READY as READY, run_workers as run_workers
