"""From a graph to a plan: distribution policies, placement options, plans as files, and a picture of one."""

from rollmill.planning.choose import choose_plan, place_custom, settings_of, uses_workers
from rollmill.planning.distribution import find_distribution, list_distributions
from rollmill.planning.halving import CurvePoint, HalvingRule, HalvingState, Judgement, default_grace_steps
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
from rollmill.planning.proposals import SAMPLERS, PastTrial, check_sampler, propose
from rollmill.planning.search_space import Axis, combinations, listed_axis, option_name, parse_axis, points

__all__ = [
    "COUNTS",
    "PLACEMENT",
    "PLACES",
    "SAMPLERS",
    "AllReduce",
    "AllReduceOption",
    "Axis",
    "Counts",
    "CurvePoint",
    "HalvingRule",
    "HalvingState",
    "Judgement",
    "PastTrial",
    "Place",
    "PlacementOptions",
    "Plan",
    "PlanSettings",
    "check_sampler",
    "choose_plan",
    "default_grace_steps",
    "draw",
    "find_distribution",
    "combinations",
    "list_distributions",
    "listed_axis",
    "option_name",
    "parse_axis",
    "place_custom",
    "points",
    "propose",
    "read_plan",
    "settings_of",
    "uses_workers",
    "write_plan",
]
