"""Seconds of an iteration in other places, from the seconds of its stages on one device."""

from typing import NamedTuple

from rollmill.plan_search.search.candidate import Candidate


class StageTimes(NamedTuple):
    """Seconds of the two stages of an iteration, for all environments in one program on one device."""

    collect: float
    learn: float


def placed_seconds(candidate: Candidate, times: StageTimes, *, cores: int) -> float:
    """Returns the seconds of an iteration of a placement, at the same number of environments.

    At best: replicas divide their stage evenly among the cores, those of a GPU as if none took anything of it from
    the others, and messages cost nothing. Stages that wait for each other follow one another. A search corrects
    what this leaves out by its first measurement of each kind.
    """
    collecting = min(_collecting(candidate), cores)
    learning = min(candidate.ranks, cores)
    collect, learn = times.collect / collecting, times.learn / learning
    return max(collect, learn) if candidate.asynchronous else collect + learn


def _collecting(candidate: Candidate) -> int:
    """Replicas that collect side by side."""
    if candidate.distribution in ("single-learner-coarse", "central"):
        return candidate.actors or 1
    return max(candidate.workers or 1, candidate.ranks)
