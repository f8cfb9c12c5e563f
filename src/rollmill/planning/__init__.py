"""From a graph to a plan: distribution policies, plans as files, and a picture of one."""

from rollmill.planning.counts import COUNTS, Counts, RecordedCounts
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.picture import draw
from rollmill.planning.plan import PLACES, Place, Plan, read_plan, write_plan

__all__ = [
    "COUNTS",
    "PLACES",
    "Counts",
    "Place",
    "Plan",
    "RecordedCounts",
    "draw",
    "find_distribution",
    "list_distributions",
    "read_plan",
    "write_plan",
]
