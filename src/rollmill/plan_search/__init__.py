"""Searches for the fastest way to run a training, by short trainings in processes of their own."""

from rollmill.plan_search.compiled_program import MemoryNeed, memory_need
from rollmill.plan_search.finding import (
    DECIDED,
    DEFAULT_BUDGET,
    FoundPlan,
    SearchRequest,
    find_plan,
    leave_devices,
)

__all__ = [
    "DECIDED",
    "DEFAULT_BUDGET",
    "FoundPlan",
    "MemoryNeed",
    "SearchRequest",
    "find_plan",
    "leave_devices",
    "memory_need",
]
