"""All four fragments together, on as many devices or processes as there are learners."""

from rollmill.dataflow import FRAGMENTS, Group, Partition
from rollmill.planning.placement import Counts, only_synchronous


def partition(counts: Counts) -> Partition:
    """`{environment, policy, gradients, update} x learners`, gradients reduced."""
    only_synchronous(counts, "gpu-only")
    return Partition("gpu-only", (Group("all", FRAGMENTS, counts.learners),))
