"""Actors collect whole rollouts, one learner learns from them (IMPALA, if asynchronous)."""

from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts


def partition(counts: Counts) -> Partition:
    """`{environment, policy} x actors, {gradients, update} x 1`."""
    return Partition(
        "single-learner-coarse",
        (
            Group(
                "actor",
                ("environment", "policy"),
                counts.actors,
                device="cpu",
                synchronous=not counts.asynchronous,
            ),
            Group("learner", ("gradients", "update")),
        ),
    )
