"""WarpDrive's automatic scaling, re-created, beside a search for a plan whose batch may grow, on Tag.

    python benchmarks/autoscale.py --name autoscale-gpu
    python benchmarks/autoscale.py --environment TagContinuous-Small-v0 --num-envs 64 --memory-limit 2e9  # CPU

WarpDrive doubles the number of environments, with one step of each in a batch, until a training of two iterations
fails for want of memory, and halves the interval between the last success and the failure. Then it does the same
with the steps of an environment in a batch. Every try is a process of its own. Here each is `rollmill train`, so
that the comparison is one of searches and not of libraries. The re-created search ends at an interval of a
sixteenth, where WarpDrive continues to one environment: that makes it shorter than the original.

Both choices are then measured in the same way. On a CPU, `--memory-limit` limits the re-created search's
processes, and is the memory that the plan search assumes.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

from measure import options, words, write_result
from planner import memory_ratios, out_of_memory

from rollmill.cli.requests import parse_training
from rollmill.core.errors import UsageError
from rollmill.plan_search.finding import SearchRequest, find_plan, leave_devices, this_machine
from rollmill.plan_search.process import CandidateProcess
from rollmill.plan_search.search.machine import HOST_SHARE
from rollmill.plan_search.search.result_table import draw_table
from rollmill.plan_search.search.searching import CannotRun, OutOfTime
from rollmill.training.request import resolve

ITERATIONS = 2
"""Iterations of a try, as WarpDrive's."""
PARTS = 16
"""A search ends when the interval is this part of its lower end."""
LEAST = 4
"""Numbers of environments are multiples of this, so that minibatches divide them."""
MANY_STEPS = 90_000_000
"""Environment steps of a training that stops once its throughput is known; for so few no kernel is timed."""


class OverTime(Exception):
    """The limit of the re-created search was reached."""


class Sizes(NamedTuple):
    """Numbers of environments and of steps of a batch."""

    num_envs: int
    num_steps: int

    def words(self, environment: str, total: int) -> list[str]:
        """Returns the arguments of `rollmill train`."""
        return words(f"ippo {environment}", **self._asdict(), total_timesteps=total)


@dataclass
class Probes:
    """Short trainings, each in a process of its own, and their outcomes."""

    environment: str
    variables: dict[str, str]
    ends_at: float
    """End of the re-created search by `time.monotonic`."""
    memory_limit: float | None
    tried: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Last lines of the trainings that failed."""

    def succeeds(self, sizes: Sizes) -> bool:
        began = time.monotonic()
        if began >= self.ends_at:
            raise OverTime
        total = ITERATIONS * sizes.num_envs * sizes.num_steps
        # The shell limits the memory of the process.
        limit = ["sh", "-c", f'ulimit -d {int((self.memory_limit or 0) / 1024)}; exec "$@"', "sh"]
        command = [*(limit if self.memory_limit else []), sys.executable, "-m", "rollmill", "train"]
        command += [
            *sizes.words(self.environment, total),
            *words("--fusion off --quiet --no-tensorboard --run-dir"),
        ]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": self.variables}
        try:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run([*command, f"{folder}/run"], timeout=self.ends_at - began, **streams)
        except subprocess.TimeoutExpired as error:
            raise OverTime from error
        succeeded = done.returncode == 0
        self.tried.append({**sizes._asdict(), "succeeded": succeeded, "seconds": time.monotonic() - began})
        print(
            f"{sizes.num_envs:,} environments x {sizes.num_steps:,} steps: ended with {done.returncode}",
            flush=True,
        )
        self.reasons += [] if succeeded else [done.stdout[-2000:]]
        return succeeded


def largest(low: int, succeeds: Callable[[int], bool], keep: Callable[[int], None], *, least: int) -> int:
    """Returns the largest multiple of `least` that succeeds, and calls `keep` with each that does.

    Halves `low` until it succeeds, doubles it until it fails, and then halves the interval.
    """
    while not succeeds(low):
        low //= 2
        if low < least:
            raise SystemExit("not even the smallest size can be trained.")
    keep(low)
    high = 2 * low
    while succeeds(high):
        keep(high)
        low, high = high, 2 * high
    while high - low > max(low // PARTS, least):
        middle = (low + high) // 2 // least * least
        if succeeds(middle):
            keep(middle)
            low = middle
        else:
            high = middle
    return low


def scale_automatically(probes: Probes, num_envs: int) -> tuple[Sizes, bool]:
    """Returns the sizes that WarpDrive's searches find, and whether they came to their end."""
    kept = [Sizes(num_envs, 1)]
    try:
        of_envs, keep = lambda count: Sizes(count, 1), kept.append
        most = largest(num_envs, lambda n: probes.succeeds(of_envs(n)), lambda n: keep(of_envs(n)), least=LEAST)
        of_steps = lambda steps: Sizes(most, steps)
        largest(1, lambda n: probes.succeeds(of_steps(n)), lambda n: keep(of_steps(n)), least=1)
    except OverTime:
        return kept[-1], False
    return kept[-1], True


def measured(arguments: list[str], variables: dict[str, str], *, seconds: float) -> dict[str, Any]:
    """Returns the throughput and memory of a training, or why there is none."""
    process = CandidateProcess(check_stop=lambda: None, environment=variables)
    try:
        process.prepare(parse_training(arguments).request)
        process.ask(None, "program", seconds=seconds)
        found = process.measure(bound=None, seconds=seconds, seeds=1, learns_from=0)
    except (CannotRun, OutOfTime) as error:
        return {"reason": str(error) or f"not enough iterations in {seconds:g} s"}
    finally:
        process.close()
    return {"steps_per_second": found.steps_per_second, "memory_bytes": found.memory}


def re_created(chosen: Any, variables: dict[str, str]) -> dict[str, Any]:
    """Runs WarpDrive's searches, and measures their choice."""
    began = time.monotonic()
    probes = Probes(chosen.environment, variables, began + chosen.seconds, chosen.memory_limit)
    sizes, ended = scale_automatically(probes, chosen.num_envs)
    seconds = time.monotonic() - began
    arguments = [*sizes.words(chosen.environment, MANY_STEPS), "--fusion", "off"]
    return {
        "search_seconds": seconds,
        "came_to_its_end": ended,
        **sizes._asdict(),
        "failures": len(probes.reasons),
        "out_of_memory": out_of_memory(probes.reasons),
        "reasons": sorted({(reason.strip().splitlines() or [""])[-1][:300] for reason in probes.reasons}),
        "probes": probes.tried,
        **measured(arguments, variables, seconds=chosen.each),
    }


def searched(chosen: Any, variables: dict[str, str]) -> dict[str, Any]:
    """Runs the plan search with the objective `grow-batch`, and measures its choice."""
    arguments = Sizes(chosen.num_envs, chosen.num_steps).words(chosen.environment, MANY_STEPS)
    training = parse_training(arguments).request
    request = SearchRequest(training, objective="grow-batch", budget=chosen.budget, fresh=True)
    machine = this_machine()
    if chosen.memory_limit is not None:
        machine = replace(machine, memory=int(chosen.memory_limit / HOST_SHARE))
    how = {"environment": variables, "machine": machine, "say": partial(print, flush=True)}
    table = find_plan(cache(resolve(training).graph), request, **how).table
    row = table.chosen
    assert row is not None
    tried = tuple(each for each in table.rows if each.status not in ("skipped", "not reached"))
    print(draw_table(replace(table, rows=tried)), flush=True)
    return {
        "search_seconds": table.seconds,
        "came_to_its_end": table.is_complete,
        "chosen": str(row.candidate),
        "num_envs": row.candidate.num_envs,
        "num_steps": chosen.num_steps,
        "candidates": len(table.rows),
        "measured": sum(each.measured_speed is not None for each in table.rows),
        "out_of_memory": out_of_memory([each.reason for each in table.rows]),
        "predicted_memory_bytes": row.predicted_memory,
        "measured_memory_bytes": row.measured_memory,
        "predicted_over_measured_memory": list(memory_ratios(table).values()),
        "table": {
            str(each.candidate): {
                **{"num_envs": each.candidate.num_envs, "status": each.status, "reason": each.reason},
                "steps_per_second": each.measured_speed,
                **{"predicted_memory": each.predicted_memory, "measured_memory": each.measured_memory},
            }
            for each in tried
        },
        **measured([*arguments, *row.candidate.words], variables, seconds=chosen.each),
    }


def main() -> None:
    chosen = options(
        __doc__,
        environment="TagContinuous-v0",
        num_envs=(1024, "first number of both searches"),
        num_steps=(32, "of a batch of the plan search"),
        seconds=(100.0, "limit of the re-created search"),
        budget=(75.0, "seconds of the plan search"),
        each=(40.0, "seconds for each choice to start and to be measured"),
        memory_limit=(float, "bytes of a process, on a CPU"),
        name="autoscale-cpu",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    variables = leave_devices()
    if chosen.memory_limit and this_machine().gpus:
        raise SystemExit("--memory-limit is for a machine without GPUs.")
    result: dict[str, Any] = {"environment": chosen.environment}
    try:
        # The plan search goes first, with a cold cache, which does not have the sizes of the other either.
        ours = result["ours"] = searched(chosen, variables)
        baseline = result["baseline"] = re_created(chosen, variables)
        both = [name for name in ("search_seconds", "steps_per_second") if name in baseline and name in ours]
        result["ours_over_baseline"] = {name: ours[name] / baseline[name] for name in both}
    except UsageError as error:
        raise SystemExit(str(error)) from error
    finally:
        write_result(chosen.name, result, chosen.output)


if __name__ == "__main__":
    main()
