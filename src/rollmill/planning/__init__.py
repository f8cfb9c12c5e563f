"""From a graph to a plan: distribution policies, placement options, plans as files, and a picture of one."""

from rollmill.planning.choose import choose_plan, place_custom, uses_workers
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.picture import draw
from rollmill.planning.placement import COUNTS, PLACEMENT, Counts, PlacementOptions
from rollmill.planning.plan import PLACES, Place, Plan, read_plan, write_plan
from rollmill.planning.search_space import Axis, parse_axis, points

__all__ = [
    "COUNTS",
    "PLACEMENT",
    "PLACES",
    "Axis",
    "Counts",
    "Place",
    "PlacementOptions",
    "Plan",
    "choose_plan",
    "draw",
    "find_distribution",
    "list_distributions",
    "parse_axis",
    "place_custom",
    "points",
    "read_plan",
    "uses_workers",
    "write_plan",
]
