"""How many replicas a distribution policy is asked for; each policy uses those that it has groups for."""

from dataclasses import dataclass

from rollmill.core.errors import UsageError


@dataclass(frozen=True)
class Counts:
    """Replicas by what they do."""

    workers: int = 2
    """Of groups that hold the environment alone."""
    actors: int = 2
    """Of groups that hold the policy, but not the update."""
    learners: int = 1
    """Of groups that hold gradients and update together."""
    asynchronous: bool = False
    """Let actors go on with the newest weights there are, instead of waiting for those of their iteration."""


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
