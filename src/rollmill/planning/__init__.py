"""From a graph to a plan: distribution policies, plans as files, and a picture of one."""

from rollmill.planning.counts import Counts
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.picture import draw
from rollmill.planning.plan import PLACES, Place, Plan, read_plan, write_plan

__all__ = [
    "PLACES",
    "Counts",
    "Place",
    "Plan",
    "draw",
    "find_distribution",
    "list_distributions",
    "read_plan",
    "write_plan",
]
