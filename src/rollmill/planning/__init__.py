"""From a graph to a plan: distribution policies, placement options, plans as files, and a picture of one."""

from rollmill.planning.choose import choose_plan, place_custom, settings_of, uses_workers
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.picture import draw
from rollmill.planning.placement import COUNTS, PLACEMENT, Counts, PlacementOptions
from rollmill.planning.plan import (
    PLACES,
    AllReduce,
    AllReduceOption,
    Place,
    Plan,
    PlanSettings,
    read_plan,
    write_plan,
)

__all__ = [
    "COUNTS",
    "PLACEMENT",
    "PLACES",
    "AllReduce",
    "AllReduceOption",
    "Counts",
    "Place",
    "PlacementOptions",
    "Plan",
    "PlanSettings",
    "choose_plan",
    "draw",
    "find_distribution",
    "list_distributions",
    "place_custom",
    "read_plan",
    "settings_of",
    "uses_workers",
    "write_plan",
]
