"""WarpDrive's automatic scaling, re-created, beside a search for a plan whose batch may grow, on Tag.

    python benchmarks/autoscale.py --name autoscale-gpu
    python benchmarks/autoscale.py --environment TagContinuous-Small-v0 --num-envs 64 --memory-limit 2e9  # CPU

WarpDrive doubles the number of environments, with one step of each in a batch, until a training of two
iterations fails for want of memory, and halves the interval between the last success and the failure. Then it
does the same with the steps of an environment in a batch. Every try is a process of its own. Here each is
`rollmill train`, so that the two ways to search are compared and not two libraries. An interval of a sixteenth
ends the search, where WarpDrive goes on to an interval of one environment: that makes the re-created search
shorter than the original.

Both choices are then measured in the same way. On a CPU, `--memory-limit` limits the re-created search's
processes, and is the memory that the plan search is told of.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from measure import RESULTS, write_result
from planner import out_of_memory

from rollmill.cli.requests import parse_training
from rollmill.core.errors import UsageError
from rollmill.plan_search.finding import SearchRequest, find_plan, leave_devices, this_machine
from rollmill.plan_search.process import CandidateProcess
from rollmill.plan_search.search.machine import HOST_SHARE, Machine
from rollmill.plan_search.search.rows import draw_table
from rollmill.plan_search.search.searching import CannotRun, OutOfTime
from rollmill.training.request import resolve

ITERATIONS = 2
"""Iterations of a try, as WarpDrive's."""
PARTS = 16
"""A search ends when the interval is this part of its lower end."""
LEAST = 4
"""Numbers of environments are multiples of this, so that minibatches divide them."""
MANY_STEPS = 90_000_000
"""Environment steps of a training that is stopped once its throughput is known; for so few no kernel is timed."""


class OverTime(Exception):
    """The limit of the re-created search was reached."""


class Sizes(NamedTuple):
    """Numbers of environments and of steps of a batch."""

    num_envs: int
    num_steps: int

    def words(self, environment: str, total: int) -> list[str]:
        """Arguments of `rollmill train`."""
        sizes = ["--num-envs", str(self.num_envs), "--num-steps", str(self.num_steps)]
        return ["ippo", environment, *sizes, "--total-timesteps", str(total)]


@dataclass
class Probes:
    """Short trainings, each in a process of its own, and what became of them."""

    environment: str
    variables: dict[str, str]
    ends_at: float
    """End of the re-created search by `time.monotonic`."""
    memory_limit: float | None
    tried: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Last lines of the trainings that failed."""

    def succeeds(self, sizes: Sizes) -> bool:
        """Whether a training of these sizes comes to its end."""
        began = time.monotonic()
        if began >= self.ends_at:
            raise OverTime
        with tempfile.TemporaryDirectory() as folder:
            code, said = self._run(sizes, Path(folder) / "run", began)
        self.tried.append({**sizes._asdict(), "succeeded": code == 0, "seconds": time.monotonic() - began})
        print(f"{sizes.num_envs:,} environments x {sizes.num_steps:,} steps: ended with {code}", flush=True)
        if code:
            self.reasons.append(said[-2000:])
        return code == 0

    def _run(self, sizes: Sizes, run: Path, began: float) -> tuple[int, str]:
        words = sizes.words(self.environment, ITERATIONS * sizes.num_envs * sizes.num_steps)
        own = ["--fusion", "off", "--run-dir", str(run), "--quiet", "--no-tensorboard"]
        try:
            done = subprocess.run(
                [*self._limited, sys.executable, "-m", "rollmill", "train", *words, *own],
                env=self.variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.ends_at - began,
            )
        except subprocess.TimeoutExpired as error:
            raise OverTime from error
        return done.returncode, done.stdout

    @property
    def _limited(self) -> list[str]:
        """The beginning of a command whose process may hold so much memory and no more."""
        if self.memory_limit is None:
            return []
        return ["sh", "-c", f'ulimit -d {int(self.memory_limit / 1024)}; exec "$@"', "sh"]


def largest(low: int, succeeds: Callable[[int], bool], keep: Callable[[int], None], *, least: int) -> int:
    """The largest number that succeeds: halved until one does, doubled until none does, then by halving intervals.

    Args:
        low: the number to begin with.
        succeeds: whether a number does.
        keep: called with each that does.
        least: numbers are multiples of this.
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
    """The sizes that WarpDrive's searches find, and whether they came to their end."""
    found = Sizes(num_envs, 1)

    def keep(sizes: Sizes) -> None:
        nonlocal found
        found = sizes

    try:
        most = largest(
            num_envs,
            lambda count: probes.succeeds(Sizes(count, 1)),
            lambda count: keep(Sizes(count, 1)),
            least=LEAST,
        )
        largest(
            1, lambda steps: probes.succeeds(Sizes(most, steps)), lambda steps: keep(Sizes(most, steps)), least=1
        )
    except OverTime:
        return found, False
    return found, True


def measured(words: list[str], variables: dict[str, str], *, seconds: float) -> dict[str, Any]:
    """Throughput and memory of a training, or why there is none."""
    process = CandidateProcess(check_stop=lambda: None, environment=variables)
    try:
        process.prepare(parse_training(words).request)
        process.ask(None, "program", seconds=seconds)
        found = process.measure(bound=None, seconds=seconds, seeds=1, learns_from=0)
    except (CannotRun, OutOfTime) as error:
        return {"reason": str(error) or f"not enough iterations in {seconds:g} s"}
    finally:
        process.close()
    return {"steps_per_second": found.steps_per_second, "memory_bytes": found.memory}


def re_created(chosen: argparse.Namespace, variables: dict[str, str]) -> dict[str, Any]:
    """WarpDrive's searches, and their choice measured."""
    began = time.monotonic()
    probes = Probes(chosen.environment, variables, began + chosen.seconds, chosen.memory_limit)
    sizes, ended = scale_automatically(probes, chosen.num_envs)
    seconds = time.monotonic() - began
    words = [*sizes.words(chosen.environment, MANY_STEPS), "--fusion", "off"]
    return {
        "search_seconds": seconds,
        "came_to_its_end": ended,
        **sizes._asdict(),
        "failures": len(probes.reasons),
        "out_of_memory": out_of_memory(probes.reasons),
        "reasons": sorted({(reason.strip().splitlines() or [""])[-1][:300] for reason in probes.reasons}),
        "probes": probes.tried,
        **measured(words, variables, seconds=chosen.each),
    }


def searched(chosen: argparse.Namespace, variables: dict[str, str]) -> dict[str, Any]:
    """The plan search with the objective `grow-batch`, and its choice measured."""
    words = Sizes(chosen.num_envs, chosen.num_steps).words(chosen.environment, MANY_STEPS)
    training = parse_training(words).request
    tell = partial(print, flush=True)
    request = SearchRequest(training, objective="grow-batch", budget=chosen.budget, fresh=True)
    machine = _machine(chosen.memory_limit)
    found = find_plan(cache(resolve(training).graph), request, environment=variables, machine=machine, say=tell)
    row = found.table.chosen
    assert row is not None
    tried = tuple(each for each in found.table.rows if each.status not in ("skipped", "not reached"))
    print(draw_table(replace(found.table, rows=tried)), flush=True)
    ratios = [
        each.predicted_memory / each.measured_memory
        for each in found.table.rows
        if each.predicted_memory and each.measured_memory
    ]
    return {
        "search_seconds": found.table.seconds,
        "came_to_its_end": found.table.is_complete,
        "chosen": str(row.candidate),
        "num_envs": row.candidate.num_envs,
        "num_steps": chosen.num_steps,
        "candidates": len(found.table.rows),
        "measured": sum(each.measured_speed is not None for each in found.table.rows),
        "out_of_memory": out_of_memory([each.reason for each in found.table.rows]),
        "predicted_memory_bytes": row.predicted_memory,
        "measured_memory_bytes": row.measured_memory,
        "predicted_over_measured_memory": ratios,
        "table": {
            str(each.candidate): {
                "num_envs": each.candidate.num_envs,
                "status": each.status,
                "reason": each.reason,
                "steps_per_second": each.measured_speed,
                "predicted_memory": each.predicted_memory,
                "measured_memory": each.measured_memory,
            }
            for each in tried
        },
        **measured([*words, *row.candidate.words], variables, seconds=chosen.each),
    }


def _machine(memory_limit: float | None) -> Machine:
    machine = this_machine()
    return machine if memory_limit is None else replace(machine, memory=int(memory_limit / HOST_SHARE))


def ratios(baseline: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """The plan search's figures over those of the re-created one."""
    return {
        name: ours[name] / baseline[name]
        for name in ("search_seconds", "steps_per_second")
        if name in baseline and name in ours
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="TagContinuous-v0", help="as benchmarks/tag.py has it")
    parser.add_argument("--num-envs", type=int, default=1024, help="that both begin with")
    parser.add_argument("--num-steps", type=int, default=32, help="of a batch of the plan search")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the re-created search at most")
    parser.add_argument("--budget", type=float, default=75.0, help="of the plan search")
    parser.add_argument(
        "--each", type=float, default=40.0, help="seconds for each choice to start, and be measured"
    )
    parser.add_argument("--memory-limit", type=float, help="bytes of a process, on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--name", default="autoscale-cpu")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    variables = leave_devices()
    if chosen.memory_limit and this_machine().gpus:
        parser.error("--memory-limit is for a machine without GPUs.")
    result: dict[str, Any] = {"environment": chosen.environment}
    try:
        # The plan search goes first and meets a cold cache; the sizes of the other are not in it either.
        result["ours"] = searched(chosen, variables)
        result["baseline"] = re_created(chosen, variables)
        result["ours_over_baseline"] = ratios(result["baseline"], result["ours"])
    except UsageError as error:
        raise SystemExit(str(error)) from error
    finally:
        write_result(chosen.name, result, directory=chosen.output)


if __name__ == "__main__":
    main()
