"""How many replicas a distribution policy is asked for; each policy uses those that it has groups for."""

from dataclasses import dataclass, field
from typing import Any

from rollmill.core.bounds import Count, check_bounds
from rollmill.core.errors import UsageError

COUNTS = ("workers", "actors", "learners", "asynchronous")


@dataclass(frozen=True)
class Counts:
    """Replicas by what they do."""

    workers: Count = 2
    """Groups that hold the environment alone."""
    actors: Count = 2
    """Groups that hold the policy, but not the update."""
    learners: Count = 1
    """Groups that hold gradients and update together."""
    asynchronous: bool = False
    """Let actors go on with the newest weights there are, instead of waiting for those of their iteration."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class RecordedCounts(Counts):
    """Counts that note which of them a distribution policy asks for: the others have no effect."""

    read: set[str] = field(default_factory=set, compare=False, repr=False)

    def __getattribute__(self, name: str) -> Any:
        if name in COUNTS:
            object.__getattribute__(self, "read").add(name)
        return object.__getattribute__(self, name)


def only_synchronous(counts: Counts, name: str) -> None:
    """Refuses what makes no sense where the policy lies beside the update.

    Raises:
        UsageError: if asynchronous actors were asked for.
    """
    if counts.asynchronous:
        raise UsageError(
            f"{name} has no asynchronous form, because its policy lies in the learner's group; use "
            "single-learner-coarse, environments or central, or leave asynchronous out."
        )
