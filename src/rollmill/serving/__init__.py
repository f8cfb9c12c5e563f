"""Serves a trained policy over HTTP on this machine, and answers the requests of many clients in batches."""

from rollmill.serving.address import (
    LOOPBACK as LOOPBACK,
    Address as Address,
    listen as listen,
    listener_url as listener_url,
    read_token as read_token,
)
from rollmill.serving.batching import BatchingRule as BatchingRule, check_rule as check_rule
from rollmill.serving.decisions import BatchedPolicy as BatchedPolicy
from rollmill.serving.limits import (
    ServerLimits as ServerLimits,
    limits_for_batches as limits_for_batches,
    raise_descriptor_limit as raise_descriptor_limit,
)
from rollmill.serving.server import Server as Server
from rollmill.serving.statistics import ServerStatistics as ServerStatistics, statistics_bytes as statistics_bytes
from rollmill.serving.workers import READY as READY, run_workers as run_workers
