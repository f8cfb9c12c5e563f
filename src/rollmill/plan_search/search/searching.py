"""Searches for the fastest candidate: skips those that cannot win, and measures the others within a budget.

A branch of growing candidates follows Algorithm 1 of GMI-DRL (USENIX ATC 2025). Each step to a larger candidate is
judged by the throughput that it gains for the memory that it adds. The branch ends at the first step that gains
too little.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from rollmill.plan_search.search.candidate import WIDTHS, Candidate, width_of
from rollmill.plan_search.search.result_table import (
    CandidateRow,
    Measurement,
    MemoryEstimate,
    PlanTable,
    Status,
    memory_text,
    speed_text,
)

THRESHOLD = 0.1
"""Minimum relative gain of throughput per relative growth of memory. A branch with less is saturated."""

MIN_GAIN = 0.02
"""Minimum relative gain of throughput. A branch with less is saturated, even if it takes no more memory."""


class Point(NamedTuple):
    """The width, throughput and memory of one measured candidate of a branch."""

    width: int
    steps_per_second: float
    memory: float | None
    """Bytes, or None if unknown. If memory is unknown, only the gain of throughput counts."""


def saturation(narrow: Point, wide: Point, *, threshold: float = THRESHOLD) -> str | None:
    """Returns the reason why a branch should end at the wider of two candidates, or None if it may continue."""
    gain = wide.steps_per_second / narrow.steps_per_second - 1
    growth = wide.memory / narrow.memory - 1 if wide.memory and narrow.memory else 0.0
    if gain > max(MIN_GAIN, threshold * growth):
        return None
    step = f"from {narrow.width:,} to {wide.width:,} throughput changed by {gain:+.0%}"
    return f"{step} for {growth:+.0%} memory" if growth else step


UNCHECKED_MARGIN = 1.5
"""Factor by which a predicted speed may be too low, before any candidate of its kind has been measured."""
CHECKED_MARGIN = 1.15
"""Factor by which a predicted speed may be too low, once a measurement has corrected the predictions of its kind.
It also allows for noise in measurements.
"""
CLOSE = 0.1
"""Relative distance from the best throughput within which candidates are measured a second time."""
MAX_REPEATED = 3


class CannotRun(Exception):
    """Error: a candidate cannot run. The message gives the reason."""


class CannotBeFused(CannotRun):
    """Error: a candidate cannot be fused, and neither can any candidate whose fusion depth is in `depths`."""

    def __init__(self, reason: str, depths: Sequence[str]) -> None:
        super().__init__(reason)
        self.depths = tuple(depths)


class OutOfTime(Exception):
    """Error: the budget of the search ended before a candidate was measured."""


class Trials(NamedTuple):
    """Functions with which a search measures candidates. The search itself starts no process."""

    check: Callable[[Candidate], str | None]
    """Returns the reason not to try a candidate, or None if no reason is known without a trial."""
    estimate_speed: Callable[[Candidate], float | None]
    """Estimates a candidate's steps per second from earlier measurements, or returns None."""
    predict_memory: Callable[[Candidate], MemoryEstimate]
    """Compiles a candidate without running it, and predicts its memory. Raises `CannotRun` and `OutOfTime`."""
    predict_speed: Callable[[Candidate], float | None]
    """Predicts the steps per second of a compiled candidate, more accurately than `estimate_speed`.

    Called if the memory suffices. Returns None if there is no better prediction. Raises `CannotRun`.
    """
    measure: Callable[[Candidate, float | None, float], Measurement]
    """`(candidate, bound, seconds)`: trains a candidate briefly, and stops once it cannot reach `bound` steps per
    second.

    `seconds` of the budget are left. Raises `CannotRun` and `OutOfTime`.
    """


def search(
    found: Iterable[Candidate],
    trials: Trials,
    *,
    budget_seconds: float,
    memory_limit: float | None = None,
    threshold: float = THRESHOLD,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> PlanTable:
    """Tries candidates in order, and returns a table in which the fastest is chosen.

    Args:
        found: the candidates, in the order in which they are tried.
        trials: functions that judge a candidate.
        budget_seconds: seconds after which no measurement begins, and a running one ends. The first candidate that
            can run is measured in any case, so that there is a choice.
        memory_limit: bytes that a candidate may take. None for no limit.
        threshold: threshold of the saturation rule, see `THRESHOLD`.
        clock: returns the time in seconds.
        say: called with a line for each candidate.
    """
    began = clock()
    state = _SearchState(trials, memory_limit, threshold, lambda: budget_seconds - (clock() - began))
    for candidate in found:
        since = clock()
        row = state.judge(candidate)
        state.rows.append(row)
        if row.status not in ("skipped", "not reached"):
            speed = None if row.measured_speed is None else f"{speed_text(row.measured_speed)} steps/s"
            say(f"{candidate}: {_join(speed or row.status, row.reason)} ({clock() - since:.0f} s)")
    state.measure_close_ones_again()
    return PlanTable(_with_choice(state.rows), clock() - began)


@dataclass
class _SearchState:
    trials: Trials
    memory_limit: float | None
    threshold: float
    left: Callable[[], float]
    """Seconds left of the budget."""
    rows: list[CandidateRow] = field(default_factory=list)
    programs: dict[str, Candidate] = field(default_factory=dict)
    same_program: dict[tuple[str, ...], Candidate] = field(default_factory=dict)
    """Kinds of candidates that turned out to compile to another's program, and that one."""
    impossible_depths: dict[str, Candidate] = field(default_factory=dict)
    """Depths of fusion that turned out to be impossible, and with which candidate."""
    speed_factors: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Measured over predicted, by kind."""
    memory_factors: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def measured(self) -> list[CandidateRow]:
        """Rows with a throughput."""
        return [row for row in self.rows if row.measured_speed is not None and row.status != "rejected"]

    @property
    def best(self) -> float | None:
        """The largest throughput so far."""
        return max((row.measured_speed or 0.0 for row in self.measured), default=None)

    def judge(self, candidate: Candidate) -> CandidateRow:
        """Returns the row of a candidate. Its status is `slower` if it was measured."""
        row = CandidateRow(candidate, "rejected", "")
        if reason := self.trials.check(candidate):
            return replace(row, reason=reason)
        if reason := self._not_worth_trying(candidate):
            return replace(row, status="skipped", reason=reason)
        row = replace(row, predicted_speed=self._scale_speed(candidate, self.trials.estimate_speed(candidate)))
        if reason := self._hopeless(candidate, row.predicted_speed):
            return replace(row, status="skipped", reason=reason)
        if self.best is not None and self.left() <= 0:
            return replace(row, status="not reached", reason="the time budget was used up")
        return self._try_once(row)

    def _try_once(self, row: CandidateRow) -> CandidateRow:
        """Tries a candidate and returns its row. If the trial fails, the row contains the predictions."""
        latest = row
        try:
            for known in self._try(row):
                latest = known
        except CannotRun as error:
            if isinstance(error, CannotBeFused):
                self.impossible_depths |= dict.fromkeys(error.depths, row.candidate)
            return replace(latest, reason=str(error))
        except OutOfTime:
            return replace(
                latest, status="not reached", reason=("the time budget was used up before its first iterations")
            )
        return latest

    def _try(self, row: CandidateRow) -> Iterator[CandidateRow]:
        """Yields the row of a candidate as its measurements arrive. The last row is complete."""
        candidate = row.candidate
        memory, program = self.trials.predict_memory(candidate)
        memory = memory and memory * self.memory_factors.get(candidate.kind, 1.0)
        yield (row := replace(row, predicted_memory=memory))
        if memory is not None and self.memory_limit is not None and memory > self.memory_limit:
            need, limit = memory_text(memory), memory_text(self.memory_limit)
            yield replace(row, reason=f"needs {need}, more than the available {limit}")
            return
        if program is not None and program in self.programs:
            self.same_program[candidate.kind] = self.programs[program]
            yield replace(row, status="skipped", reason=f"the same program as {self.programs[program]}")
            return
        speed = self._scale_speed(candidate, self.trials.predict_speed(candidate))
        yield (row := replace(row, predicted_speed=speed or row.predicted_speed))
        if reason := self._hopeless(candidate, row.predicted_speed):
            yield replace(row, status="skipped", reason=reason)
            return
        yield self._measure(row, program)

    def _scale_speed(self, candidate: Candidate, speed: float | None) -> float | None:
        return speed and speed * self.speed_factors.get(candidate.kind, 1.0)

    def _measure(self, row: CandidateRow, program: str | None) -> CandidateRow:
        candidate, bound = row.candidate, self.best
        found = self.trials.measure(candidate, bound, float("inf") if bound is None else self.left())
        if program is not None:
            self.programs[program] = candidate
        self._correct(row, found)
        row = replace(row, measured_speed=found.steps_per_second, measured_memory=found.memory)
        if found.memory is not None and self.memory_limit is not None and found.memory > self.memory_limit:
            need, limit = memory_text(found.memory), memory_text(self.memory_limit)
            return replace(row, reason=f"took {need}, more than the available {limit}")
        early = "stopped early, because it could no longer win" if found.stopped_early else ""
        return replace(row, status="slower", reason=early)

    def _correct(self, row: CandidateRow, found: Measurement) -> None:
        """Corrects the predictions for a kind of candidates by the kind's first measurement."""
        kind = row.candidate.kind
        if kind not in self.speed_factors and row.predicted_speed:
            self.speed_factors[kind] = found.steps_per_second / row.predicted_speed
        if kind not in self.memory_factors and row.predicted_memory and found.memory:
            self.memory_factors[kind] = found.memory / row.predicted_memory

    def _hopeless(self, candidate: Candidate, speed: float | None) -> str | None:
        """Returns why a candidate is not measured, by its prediction."""
        if speed is None or self.best is None:
            return None
        margin = CHECKED_MARGIN if candidate.kind in self.speed_factors else UNCHECKED_MARGIN
        if speed * margin >= self.best:
            return None
        return f"predicted {speed_text(speed)} steps/s; the best so far is {self.best / speed:.1f} x as fast"

    def _not_worth_trying(self, candidate: Candidate) -> str | None:
        """Returns why a candidate is not tried, by others of its kind or branches."""
        if same := self.same_program.get(candidate.kind):
            return f"the other candidates of its kind are the same programs as those of {same}"
        if refused := self.impossible_depths.get(candidate.fusion or ""):
            return f"cannot be fused, because {refused}"
        if reason := self._explain_failed_narrower(candidate):
            return reason
        for width in WIDTHS:
            narrower = self._narrower(candidate, width)
            if not narrower:
                continue
            if reason := self._explain_saturation(narrower, width):
                return reason
            if reason := self._explain_domination(candidate, narrower[-1], width):
                return reason
        return None

    def _explain_failed_narrower(self, candidate: Candidate) -> str | None:
        """Returns why a candidate is not grown: with fewer environments it did not run, or is far too slow."""
        if candidate.num_envs is None:
            return None
        fewer = self._fewer_envs(candidate)
        if fewer is None or self.trials.check(fewer.candidate):
            return None
        number = fewer.candidate.num_envs or 1
        if fewer.status == "rejected":
            return f"the same plan with {number:,} environments was rejected: {fewer.reason}"
        if fewer.measured_speed is not None:
            return None
        most = (fewer.predicted_speed or 0.0) * candidate.num_envs / number
        if self.best is None or not most or most * UNCHECKED_MARGIN >= self.best:
            return None
        return (
            f"dominated: even scaled in proportion to {number:,} environments, it is slower than the best so far"
        )

    def _fewer_envs(self, candidate: Candidate) -> CandidateRow | None:
        """Returns the row of the candidate with the next smaller number of environments, if one is known."""
        branch, envs = candidate.branch("num_envs"), candidate.num_envs or 1
        rows = [
            row
            for row in self.rows
            if row.candidate.branch("num_envs") == branch
            and (row.candidate.num_envs or envs) < envs
            and (row.status == "rejected" or row.measured_speed or row.predicted_speed)
        ]
        return max(rows, key=lambda row: row.candidate.num_envs or 1, default=None)

    def _narrower(self, candidate: Candidate, width: str) -> Sequence[CandidateRow]:
        """Returns the measured rows of the branch along a width, narrowest first."""
        branch, limit = candidate.branch(width), width_of(candidate, width)
        rows = [
            row
            for row in self.measured
            if row.candidate.branch(width) == branch and width_of(row.candidate, width) < limit
        ]
        return sorted(rows, key=lambda row: width_of(row.candidate, width))

    def _explain_saturation(self, narrower: Sequence[CandidateRow], width: str) -> str | None:
        if len(narrower) < 2:
            return None
        low, high = (
            Point(width_of(row.candidate, width), row.measured_speed or 0.0, row.measured_memory)
            for row in narrower[-2:]
        )
        step = saturation(low, high, threshold=self.threshold)
        return step and f"saturated along {width}: {step}"

    def _explain_domination(self, candidate: Candidate, narrower: CandidateRow, width: str) -> str | None:
        """Returns why a candidate cannot win, because throughput grows at most in proportion to a width."""
        ratio = width_of(candidate, width) / width_of(narrower.candidate, width)
        most = ratio * (narrower.measured_speed or 0.0)
        if self.best is None or most * CHECKED_MARGIN >= self.best:
            return None
        return f"dominated: even {ratio:.3g} x the throughput of {narrower.candidate} is less than the best so far"

    def measure_close_ones_again(self) -> None:
        """Measures the best candidates once more, if they are close, so that noise decides less."""
        ranked = sorted(self.measured, key=lambda row: -(row.measured_speed or 0.0))
        best = self.best or 0.0
        close = [row for row in ranked if not row.reason and (row.measured_speed or 0.0) >= (1 - CLOSE) * best]
        if len(close) < 2:
            return
        for row in close[:MAX_REPEATED]:
            if self.left() <= 0:
                return
            self._repeat(row)

    def _repeat(self, row: CandidateRow) -> None:
        try:
            again = self.trials.measure(row.candidate, None, self.left())
        except (CannotRun, OutOfTime):
            return
        mean = fmean((row.measured_speed or 0.0, again.steps_per_second))
        self.rows[self.rows.index(row)] = replace(row, measured_speed=mean, reason="mean of two measurements")


def _with_choice(rows: Sequence[CandidateRow]) -> tuple[CandidateRow, ...]:
    """Returns the rows with the choice, and how much slower than it the others are."""
    ranked = sorted(
        (row for row in rows if row.status == "slower"), key=lambda row: row.measured_speed or 0.0, reverse=True
    )
    if not ranked:
        return tuple(rows)
    chosen, *others = ranked
    best = chosen.measured_speed or 0.0

    def final(row: CandidateRow) -> CandidateRow:
        status: Status = "chosen" if row is chosen else row.status
        if row is chosen:
            return replace(row, status=status, reason=_join(_why(best, others), row.reason))
        if row.status != "slower":
            return row
        return replace(row, reason=_join(f"{_share(row, best):.0%} of the chosen plan's speed", row.reason))

    return tuple(map(final, rows))


def _why(best: float, others: Sequence[CandidateRow]) -> str:
    if not others:
        return "the only candidate that could be measured"
    return f"{1 / _share(others[0], best):.2f} x the next, {others[0].candidate}"


def _share(row: CandidateRow, best: float) -> float:
    return max(row.measured_speed or 0.0, 1e-9) / max(best, 1e-9)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
