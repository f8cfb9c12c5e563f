"""Environments on CPU workers, everything else in several learners that reduce their gradients."""

from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts, only_synchronous


def partition(counts: Counts) -> Partition:
    """`{environment} x workers, {policy, gradients, update} x learners`, gradients reduced."""
    only_synchronous(counts, "multi-learner")
    return Partition(
        "multi-learner",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("learner", ("policy", "gradients", "update"), counts.learners),
        ),
    )
