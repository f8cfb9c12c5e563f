"""The search for the fastest way to run a training: candidates, rules to leave most of them out, and a table.

Pure: what a candidate takes and how fast it is are functions that the caller passes.
"""

from rollmill.plan_search.search.candidate import Candidate, restricted
from rollmill.plan_search.search.enumeration import candidates, most_stepping
from rollmill.plan_search.search.machine import Machine, Objective, Workload
from rollmill.plan_search.search.rows import (
    CandidateRow,
    Measurement,
    MemoryEstimate,
    PlanTable,
    draw_table,
    memory_text,
    speed_text,
)
from rollmill.plan_search.search.saturation import Point, saturation
from rollmill.plan_search.search.searching import CannotBeFused, CannotRun, OutOfTime, Trials, search

__all__ = [
    "Candidate",
    "CandidateRow",
    "CannotBeFused",
    "CannotRun",
    "Machine",
    "Measurement",
    "MemoryEstimate",
    "Objective",
    "OutOfTime",
    "PlanTable",
    "Point",
    "Trials",
    "Workload",
    "candidates",
    "draw_table",
    "memory_text",
    "most_stepping",
    "restricted",
    "saturation",
    "search",
    "speed_text",
]
