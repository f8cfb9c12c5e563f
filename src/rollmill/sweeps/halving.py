"""Asynchronous successive halving: decides which trials of a sweep are stopped early.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020. A trial that reaches a rung is
compared with the trials that reached it earlier, and continues if it is among the best `1 / reduction_factor`.

In the paper, a trial pauses at each rung and is promoted later, once enough other trials are worse. Here, as in
Ray Tune and Optuna, a trial is judged only once, and either continues without a pause or is stopped. To continue a
paused trial, a process would have to start and compile again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmill.core.errors import UsageError

Rungs = Mapping[int, Mapping[str, float]]
"""Results at all rungs: for each rung, given by its number of steps, the results by trial."""


@dataclass(frozen=True)
class HalvingRule:
    """Settings of successive halving, whose rungs are at `grace_steps * reduction_factor**k` environment steps, k
    = 0, 1, ...
    """

    grace_steps: int
    """Number of environment steps at the first rung. No trial is stopped earlier."""
    reduction_factor: int = 3
    """One in this many trials continues at each rung."""

    def __post_init__(self) -> None:
        if self.reduction_factor < 2:
            raise UsageError(f"reduction_factor={self.reduction_factor} must be at least 2.")
        if self.grace_steps < 1:
            raise UsageError(f"grace_steps={self.grace_steps} must be at least 1.")


class CurvePoint(NamedTuple):
    """The mean return of a trial after a number of environment steps."""

    steps: int
    result: float


@dataclass(frozen=True)
class Judgement:
    """The comparison of a trial with earlier trials at a rung."""

    steps: int
    """Number of environment steps of the rung."""
    result: float
    """The trial's first result at or after the rung."""
    place: int
    """Rank of the trial at the rung, 1 for the best."""
    trials: int
    """Number of trials that have reached the rung, including this one."""
    stays: bool


def default_grace_steps(total_steps: int, reduction_factor: int) -> int:
    """Returns the default number of steps of the first rung, such that there are three rungs before the end of the
    run.
    """
    return max(1, total_steps // reduction_factor**3)


def judge(rule: HalvingRule, rungs: Rungs, trial: str, curve: Sequence[CurvePoint]) -> list[Judgement]:
    """Judges a trial at all rungs that it has newly reached, up to the first rung at which it must stop.

    The same trials with the same results in the same order are judged alike. `rungs` contain the results so far,
    and the rungs at which the trial itself was judged. `curve` has the trial's results in order of steps. Points
    before the rungs may be left out.
    """
    judgements: list[Judgement] = []
    steps = rule.grace_steps
    while (result := next((point.result for point in curve if point.steps >= steps), None)) is not None:
        if trial not in rungs.get(steps, {}):
            judgements.append(_compare(rule, steps, result, list(rungs.get(steps, {}).values())))
            if not judgements[-1].stays:
                break
        steps *= rule.reduction_factor
    return judgements


def _compare(rule: HalvingRule, steps: int, result: float, others: Sequence[float]) -> Judgement:
    """Ties continue, and so does the best so far, however few there are."""
    place = 1 + sum(other > result for other in others)
    trials = len(others) + 1
    return Judgement(steps, result, place, trials, stays=place <= max(1, trials // rule.reduction_factor))


@dataclass
class HalvingState:
    """The results at all rungs and the stopped trials of a sweep, as stored in a file."""

    rungs: dict[int, dict[str, float]] = field(default_factory=dict)
    stopped: dict[str, Judgement] = field(default_factory=dict)
    ended: bool = False
    """True once early stopping is turned off, so that no further trial is stopped."""

    def judge(self, rule: HalvingRule, trial: str, curve: Sequence[CurvePoint]) -> list[Judgement]:
        """Judges a trial and records the results. Does nothing if the trial is already stopped, or if the sweep
        stops no trials any more.
        """
        if self.ended or trial in self.stopped:
            return []
        judgements = judge(rule, self.rungs, trial, curve)
        for judgement in judgements:
            self.rungs.setdefault(judgement.steps, {})[trial] = judgement.result
            if not judgement.stays:
                self.stopped[trial] = judgement
        return judgements
