"""The search for a plan beside a sweep of all its candidates, on this machine.

    python benchmarks/planner.py cartpole alphazero tag --rounds 3
    python benchmarks/planner.py cartpole-gpu tag-gpu alphazero-gpu --name planner-gpu --seconds 780 --each 60

Every candidate is measured as the search measures it, but without predictions or a budget; candidates that
compile to the same program are measured once. In the first round all are measured, in the others those within a
fifth of the best, in turns. Then the search itself runs, as `rollmill plan --search-plan --fresh` does. Its
choice is judged by the sweep's medians: the search's own measurements do not count. Predicted memory is compared
with measured.

With `--seconds` or `--brief`, a candidate is measured for one second instead of three if it is slower than the
best so far by a fifth. It is left out, with the reason in the result, if twice the throughput of a narrower one
of its branch in proportion could not win, or if the branch already falls and is less than half of the best. The
result names the candidates for which no time was left. Results are written after each training, and when the
command is stopped.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

from measure import options, some_of, spread, write_result

from rollmill.cli.requests import parse_training
from rollmill.plan_search.finding import (
    DEFAULT_BUDGET,
    FoundPlan,
    SearchRequest,
    find_plan,
    leave_devices,
    list_candidates,
    this_machine,
    workload_of,
)
from rollmill.plan_search.process import START_SECONDS
from rollmill.plan_search.search.candidate import WIDTHS, Candidate, width_of
from rollmill.plan_search.search.result_table import Measurement, PlanTable
from rollmill.plan_search.search.searching import CannotRun, OutOfTime
from rollmill.plan_search.trials import ProcessTrials
from rollmill.training.request import resolve

WORKS = {
    "cartpole": "ppo CartPole-v1 --num-envs 64 --num-steps 64 --total-timesteps 20000000",
    "cartpole-wide": "ppo CartPole-v1 --num-envs 2048 --num-steps 32 --total-timesteps 20000000",
    "tag": "ippo TagContinuous-v0 --num-envs 8 --num-steps 32 --total-timesteps 20000000",
    "alphazero": "alphazero TicTacToe-v0 --num-envs 32 --num-steps 16 --total-timesteps 2000000",
    "host": "ppo gymnasium:CartPole-v1 --num-envs 8 --num-steps 128 --total-timesteps 2000000",
    "cartpole-gpu": "ppo CartPole-v1 --num-envs 4096 --num-steps 128 --total-timesteps 10000000000",
    "tag-gpu": "ippo TagContinuous-v0 --num-envs 1024 --num-steps 32 --total-timesteps 50000000",
    "alphazero-gpu": "alphazero ConnectFour-v0 --num-envs 256 --num-steps 16 --total-timesteps 50000000",
}
"""Trainings by name; those for a GPU are as wide as one needs. Tag and AlphaZero end before automatic fusion would
time kernels, which neither has for its rollouts."""
CLOSE = 0.8
"""Share of the best from which on a candidate is measured in every round."""


class Swept(NamedTuple):
    """Measurements of a candidate in the rounds of the sweep."""

    speeds: list[float]
    memory: list[float]
    reason: str = ""
    """Why it was not measured."""
    stopped_early: bool = False
    """True if it was measured for a second only, because it was far behind."""


def measure_alone(
    trials: ProcessTrials,
    candidate: Candidate,
    bound: float | None = None,
    programs: dict[str, Candidate] | None = None,
) -> Measurement:
    """Measures one candidate; raises `CannotRun` if it cannot run, or compiles to the same as one of
    `programs`.
    """
    if reason := trials.check(candidate):
        raise CannotRun(reason)
    identity = trials.predict_memory(candidate).program
    if programs is not None and identity and programs.setdefault(identity, candidate) != candidate:
        raise CannotRun(f"the same program as {programs[identity]}")
    return trials.measure(candidate, bound, trials.start_seconds)


@dataclass
class Sweep:
    """Measures candidates in turns, and keeps the figures."""

    trials: ProcessTrials
    swept: dict[Candidate, Swept]
    brief: bool
    """Whether candidates far behind are measured for a shorter time, or left out."""
    ends_at: float
    """End of the sweep by `time.monotonic`."""
    each: float
    """Seconds of a candidate to compile, and again to be measured."""
    programs: dict[str, Candidate] = field(default_factory=dict)

    @property
    def medians(self) -> dict[Candidate, float]:
        return {candidate: median(each.speeds) for candidate, each in self.swept.items() if each.speeds}

    @property
    def best(self) -> float | None:
        return max(self.medians.values(), default=None)

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            for candidate in self.swept:
                if number == 0 or self._is_close(candidate):
                    self._try(candidate)

    def _is_close(self, candidate: Candidate) -> bool:
        speed = self.medians.get(candidate)
        return speed is not None and (not self.brief or speed >= CLOSE * (self.best or 0.0))

    def _try(self, candidate: Candidate) -> None:
        try:
            if time.monotonic() >= self.ends_at:
                raise CannotRun("not measured: the time of the sweep was over")
            if self.brief and (reason := cannot_matter(candidate, self.medians)):
                raise CannotRun(reason)
            self.trials.start_seconds = min(self.each, self.ends_at - time.monotonic())
            bound = self.best if self.brief else None
            self.add(candidate, measure_alone(self.trials, candidate, bound, self.programs))
        except (CannotRun, OutOfTime) as error:
            reason = str(error) or f"did not start within {self.trials.start_seconds:g} s"
            if not self.swept[candidate].speeds:
                self.swept[candidate] = self.swept[candidate]._replace(reason=reason)
                print(f"{candidate}: {reason}", flush=True)

    def add(self, candidate: Candidate, found: Measurement) -> None:
        each = self.swept.setdefault(candidate, Swept([], []))
        each.speeds.append(found.steps_per_second)
        each.memory.extend([] if found.memory is None else [found.memory])
        self.swept[candidate] = each._replace(reason="", stopped_early=found.stopped_early)
        print(f"{candidate}: {found.steps_per_second:,.0f} steps/s", flush=True)

    def described(self) -> dict[str, Any]:
        unmeasured = "not measured: the sweep was stopped"
        return {
            str(candidate): {
                "steps_per_second": spread(each.speeds),
                "memory_bytes": spread(each.memory) if each.memory else None,
                "stopped_early": each.stopped_early,
            }
            if each.speeds
            else {"reason": each.reason or unmeasured}
            for candidate, each in self.swept.items()
        }


def cannot_matter(candidate: Candidate, medians: Mapping[Candidate, float]) -> str | None:
    """Returns why a candidate is left out of a brief sweep, by narrower ones of its branches."""
    best = max(medians.values(), default=0.0)
    for width in WIDTHS:
        narrower = sorted(
            (width_of(each, width), speed, str(each))
            for each, speed in medians.items()
            if each.branch(width) == candidate.branch(width) and width_of(each, width) < width_of(candidate, width)
        )
        if not narrower:
            continue
        at, speed, name = narrower[-1]
        if 2 * speed * width_of(candidate, width) / at < best:
            return f"left out: even twice {name} in proportion is less than the best"
        if len(narrower) > 1 and speed < narrower[-2][1] and speed < best / 2:
            return f"left out: the branch falls, and {name} is {speed / best:.2f} of the best"
    return None


def judged(found: FoundPlan, medians: Mapping[Candidate, float]) -> dict[str, Any]:
    """Returns the search's choice beside the sweep's best, and its predictions beside its measurements."""
    best, chosen = max(medians, key=lambda candidate: medians[candidate]), found.table.chosen
    assert chosen is not None
    return {
        "chosen": str(chosen.candidate),
        "chosen_steps_per_second": medians[chosen.candidate],
        "best": str(best),
        "best_steps_per_second": medians[best],
        "chosen_over_best": medians[chosen.candidate] / medians[best],
        "search_seconds": found.table.seconds,
        "measured_by_search": sum(row.measured_speed is not None for row in found.table.rows),
        "candidates": len(found.table.rows),
        "predicted_over_measured_memory": memory_ratios(found.table),
        "search": {str(row.candidate): f"{row.status}: {row.reason}" for row in found.table.rows},
    }


def memory_ratios(table: PlanTable) -> dict[str, float]:
    """Returns predicted over measured memory of the candidates that have both."""
    both = (row for row in table.rows if row.predicted_memory and row.measured_memory)
    return {str(row.candidate): row.predicted_memory / row.measured_memory for row in both}


def out_of_memory(reasons: Sequence[str]) -> int:
    """Counts the failures for want of memory."""
    signs = ("resource_exhausted", "out of memory", "bad_alloc")
    return sum(any(sign in reason.lower() for sign in signs) for reason in reasons)


def compare(name: str, chosen: Any, ends_at: float, environment: dict[str, str], result: dict[str, Any]) -> None:
    """Fills the result of a training, which holds the sweep even if the search is cut off."""
    request = SearchRequest(parse_training(WORKS[name].split()).request, budget=chosen.budget, fresh=True)
    graph_of, began = cache(resolve(request.training).graph), time.monotonic()
    work, machine = workload_of(graph_of(None), request.options), this_machine()
    brief = bool(chosen.brief or chosen.seconds)
    # The narrow ones first: a brief sweep leaves out wider ones by them.
    widest = lambda candidate: max(width_of(candidate, width) for width in WIDTHS)
    candidates = sorted(list_candidates(request, machine, work), key=widest)
    how = (request.training, request.options, machine, work, lambda: None, environment)
    trials = ProcessTrials(graph_of, *how)
    sweep = Sweep(trials, {each: Swept([], []) for each in candidates}, brief, ends_at, chosen.each)
    result |= {"command": WORKS[name], "rounds": chosen.rounds, "budget": chosen.budget, "brief": brief}
    try:
        sweep.run(chosen.rounds)
    finally:
        trials.close()
        result |= {"sweep": sweep.described(), "sweep_seconds": time.monotonic() - began}
    found = find_plan(graph_of, request, environment=environment, say=partial(print, flush=True))
    trials.start_seconds = chosen.each
    if found.table.chosen and found.table.chosen.candidate not in sweep.medians:
        with contextlib.closing(trials):
            sweep.add(found.table.chosen.candidate, measure_alone(trials, found.table.chosen.candidate))
    reasons = [each.reason for each in sweep.swept.values()] + [row.reason for row in found.table.rows]
    result |= judged(found, sweep.medians)
    result |= {"out_of_memory": out_of_memory(reasons), "sweep": sweep.described()}
    print(f"{name}:", {key: value for key, value in result.items() if key not in ("sweep", "search")}, flush=True)


def main() -> None:
    chosen = options(
        __doc__,
        {"works": some_of(WORKS)},
        rounds=3,
        budget=(float(DEFAULT_BUDGET), "seconds of each search"),
        each=(float(START_SECONDS), "seconds for a candidate to start"),
        seconds=(float, "of everything; sweeps are brief, and end in time for searches"),
        brief=(False, "leave out candidates that are far behind, or measure them shorter"),
        name="planner-cpu",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    environment, began = leave_devices(), time.monotonic()
    share = float("inf") if chosen.seconds is None else chosen.seconds / len(chosen.works)
    results: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(chosen.works, 1):
        ends_at = began + number * share - 1.3 * chosen.budget
        try:
            compare(name, chosen, ends_at, environment, results.setdefault(name, {}))
        finally:
            write_result(chosen.name, results, chosen.output)


if __name__ == "__main__":
    main()
