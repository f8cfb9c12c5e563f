"""Environments on CPU workers, one learner decides and learns for all of them."""

from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts, only_synchronous


def partition(counts: Counts) -> Partition:
    """`{environment} x workers, {policy, gradients, update} x 1`."""
    only_synchronous(counts, "single-learner-fine")
    return Partition(
        "single-learner-fine",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("learner", ("policy", "gradients", "update")),
        ),
    )
