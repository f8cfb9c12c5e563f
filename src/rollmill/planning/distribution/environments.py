"""Environments, policies and learners apart, each with its own number of replicas."""

from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts


def partition(counts: Counts) -> Partition:
    """`{environment} x workers, {policy} x actors, {gradients, update} x learners`."""
    return Partition(
        "environments",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("policy", ("policy",), counts.actors, synchronous=not counts.asynchronous),
            Group("learner", ("gradients", "update"), counts.learners),
        ),
    )
