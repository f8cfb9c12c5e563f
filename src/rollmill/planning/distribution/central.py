"""Actors compute gradients of their own rollouts, one place applies them (A3C, if asynchronous)."""

from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts


def partition(counts: Counts) -> Partition:
    """`{environment, policy, gradients} x actors, {update} x 1`."""
    return Partition(
        "central",
        (
            Group(
                "actor",
                ("environment", "policy", "gradients"),
                counts.actors,
                synchronous=not counts.asynchronous,
            ),
            Group("update", ("update",)),
        ),
    )
