"""The profiler's figures, checked: its correction, its attribution by planted work; and a survey.

    python benchmarks/profiler.py errors [--platform cpu] [--repeats 5] [--workload NAME ...]
    python benchmarks/profiler.py planted [--repeats 5] [--operation NAME ...]
    python benchmarks/profiler.py off [--repeats 5]
    python benchmarks/profiler.py survey [--workload ALGORITHM ...]

- `errors`: profiles each workload several times, each in a process of its own, and takes the relative difference
  of the corrected duration of an iteration from the unprofiled one (RL-Scope states +-16 %);
- `planted`: adds matrix products to one operation at a time; a training with many of them and one with two take
  turns. The truth is how much longer an iteration takes without the profiler; the operation has to grow by
  that, and all others by nothing;
- `off`: the cost of a profiler that records nothing: short iterations with the spans of the host and without
  them take turns, while nothing is recorded; and, which noise hides less, how many spans an iteration has and how
  long one takes;
- `survey`: shares of simulation, inference, backpropagation, replay and search of all algorithms.

advice.py measures the value of the advice of profiles.

All but the survey have other sizes with `--platform gpu`. Each row is written at once, to
results/profiler-PART-PLATFORM.json. With `--add`, earlier rows of the same commit are kept, and the profiles of
`errors`.
"""

import itertools
import json
import os
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeAlias

import jax
from measure import Failed, alone, one_of, options, rollmill as command_line, this_commit, write_result

import rollmill
from rollmill.core import operations
from rollmill.dataflow import Graph
from rollmill.profiling import summary
from rollmill.profiling.breakdown import whole_time
from rollmill.profiling.calibration import Calibration, load_or_calibrate
from rollmill.profiling.correction import EventCosts, PairedWindow, costs, middle_mean
from rollmill.profiling.recording import RecordedWindow, TraceRecorder
from rollmill.profiling.results import UNNAMED, OperationTime, Profile, read_profile
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.states import start_state

ON_GPU = {
    "ppo, CartPole-v1": "ppo CartPole-v1 --num-envs 4096 --num-steps 128 --fusion off",
    "ppo, CartPole-v1, fused": "ppo CartPole-v1 --num-envs 4096 --num-steps 128 --fusion full",
    "ppo, CartPole-v1, 64 x 64": "ppo CartPole-v1 --num-envs 64 --num-steps 64 --fusion off",
    "alphazero, ConnectFour-v0": "alphazero ConnectFour-v0 --num-envs 256",
}
CHEETAH = "ppo gymnasium:HalfCheetah-v5 --num-envs 8 --num-steps 64"
TWO_SERVERS = "ppo, HalfCheetah of Gymnasium, two environment servers"
WORKLOADS = {
    "ppo, CartPole-v1": "ppo CartPole-v1 --num-envs 256 --fusion off",
    "ppo, CartPole-v1, fused": "ppo CartPole-v1 --num-envs 1024 --fusion full",
    "ppo, HalfCheetah of Gymnasium": CHEETAH,
    TWO_SERVERS: f"{CHEETAH} --distribution single-learner-fine --workers 2",
    "a3c, CartPole-v1, four actors": "a3c CartPole-v1 --num-envs 64 --distribution central --actors 4",
    "mappo, TagContinuous": "mappo TagContinuous-v0 --num-envs 4 --num-steps 16",
    "alphazero, TicTacToe-v0": "alphazero TicTacToe-v0 --num-envs 64",
}
SURVEYED = {
    "ppo": ["CartPole-v1", "Pendulum-v1", "gymnasium:HalfCheetah-v5 --num-envs 8"],
    "a3c": ["CartPole-v1", "Acrobot-v1", "gymnasium:CartPole-v1"],
    "mappo": ["TagContinuous-v0 --num-envs 4 --num-steps 16"]
    + ["TagContinuous-Small-v0 --num-envs 16", "TagGridWorld-v0 --num-envs 32"],
    "dqn": ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"],
    "sac": ["Pendulum-v1", "MountainCarContinuous-v0", "gymnasium:HalfCheetah-v5 --num-envs 8"],
    "alphazero": ["TicTacToe-v0 --num-envs 64", "ConnectFour-v0 --num-envs 64", "pgx:animal_shogi --num-envs 16"],
}
"""Environments of each algorithm; on-policy and off-policy ones share some, for comparison."""
PLACEMENTS = {
    "one program": "",
    "actors and a learner": "--distribution single-learner-coarse --actors 2",
}
Rows: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
GROUPS = {
    "simulation": ("environment",),
    "inference": ("policy", "network"),
    "search": ("search",),
    "backpropagation": ("gradients", "update"),
    "replay": ("store", "draw"),
    "preparation": ("prepare", "shuffle", "metrics"),
}
"""Operations by what they are; the innermost of a path counts. Others are the host's work around programs, such as
dispatch, messages and logs, or the rest of the device's."""


def profiled(words: Sequence[str], **how: Any) -> Profile:
    """Returns the profile of a training in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command_line("profile", *words, "--output", f"{folder}/profile", **{"timeout": 1200, **how})
        file = Path(folder) / "profile" / "profile.json"
        return read_profile(file.read_bytes(), where=str(file))


SHORT = "--window-seconds 0.4 --profiled-seconds 0.4"
"""Durations of windows. Other work slows a machine for seconds at a time, by up to a half: shorter windows see the
same machine as those before them."""
MANY = f"--unread-windows 42 {SHORT}"
"""Options of profiles whose errors are measured: the mean of many windows is sharp. Even numbers, so that windows
that are read are among those that give the cost, and among those that test it."""
WINDOWS = {
    # Here processes wait for each other in every step, so that the noise of each is that of all.
    TWO_SERVERS: f"--unread-windows 80 {SHORT}",
    # Here an iteration takes long with the profiler.
    "alphazero, TicTacToe-v0": "--unread-windows 16 --window-seconds 0.5 --profiled-seconds 0.6",
}


def errors(chosen: Any) -> Rows:
    """Yields a row for each profile; `main` joins those of a training."""
    for name, words in (ON_GPU if chosen.platform == "gpu" else WORKLOADS).items():
        if chosen.workload and name not in chosen.workload:
            continue
        windows = WINDOWS.get(name, "" if chosen.platform == "gpu" else MANY)
        command = [*words.split(), *windows.split()]
        for _ in range(chosen.repeats):
            found = profiled(command)
            print(f"{name}: {found.iteration.error:+.1%}", flush=True)
            yield name, {"command": command, "profiles": [_figures(found)]}


def _figures(found: Profile) -> dict[str, Any]:
    return {
        "error": found.iteration.error,
        "slowdown": found.iteration.profiled / found.iteration.unprofiled,
        "unnamed_share_of_device": _unnamed(found),
        "iteration_seconds": found.iteration.unprofiled,
        "cores": found.machine.cores,
        "devices": [asdict(device) for device in found.devices],
        "slowdowns": " ".join(f"{each.profiled / each.unprofiled:.3f}" for each in found.windows),
        "waiting": " ".join(f"{w.waiting / w.unprofiled:.3f}" for w in found.windows if w.waiting is not None),
        "events": found.book_keeping[0].events,
        "event_nanoseconds": found.book_keeping[0].nanoseconds,
        "calibrated_event_nanoseconds": found.book_keeping[0].calibrated,
        "error_by_calibration": _error_by_calibration(found),
    }


def _error_by_calibration(found: Profile) -> float | None:
    """Returns the error of a correction that knows nothing of this training without the profiler.

    Events cost as much as in the calibration's program, and an accelerator does not wait. None where the time of
    waiting is unknown.
    """
    cost = 1e-9 * found.book_keeping[0].calibrated
    known = [each for each in found.windows if each.waiting is not None]
    corrected = [(each.profiled - each.waiting - each.events * cost) / each.unprofiled for each in known]
    return middle_mean(corrected) - 1.0 if corrected else None


def _unnamed(found: Profile) -> float:
    total = sum(operation.device for operation in found.operations)
    if not total:
        raise SystemExit("nothing of the device was recorded")
    return sum(operation.device for operation in found.operations if operation.path[0] == UNNAMED) / total


PLANTED = ("environment", "policy", "prepare", "gradients", "update")
TURN_SECONDS = 0.3
"""Shortest duration of a turn of one of two trainings that are compared."""
PROFILED_SECONDS = 0.12
"""Shortest duration of a turn with the profiler, whose trace takes much longer to read."""
SETTLE_SECONDS = 0.1
"""Time before a turn that does not count: a machine that had a rest is faster for a while."""
SETTLE_TURNS = 6
"""Turns after the beginning of a recording that do not count, on a GPU."""
ROUNDS = 4
"""Rounds of turns of one of the `--repeats`, after each of which the row is written anew."""
PLAIN_TURNS = 6
"""Turns without the profiler for each with it: the truth is the difference between them, and they are short."""


class Products(NamedTuple):
    """Matrix products, one after the other; for each environment, step or sample, as the operation is computed."""

    number: int
    width: int
    """Rows and columns of the matrix that all multiply by."""
    rows: int = 1
    """Rows of what is multiplied; a vector if there is one."""


PRODUCTS = {
    "environment": Products(6, 256),
    "policy": Products(6, 256),
    "prepare": Products(36, 256, rows=16),
    "gradients": Products(28, 64),
    "update": Products(34, 128, rows=1024),
}
"""Products that are added to an operation: each takes much longer than it takes to record it, as most of what
trainings compute does, and is large enough for all threads. While one worked, others would sleep, and what
follows, such as gradients, would take longer until they are awake, with the profiler or without."""
PRODUCTS_ON_GPU = {
    "environment": Products(6, 1024),
    "policy": Products(6, 1024),
    "prepare": Products(400, 256, rows=256),
    "gradients": Products(100, 64),
    "update": Products(50, 1024, rows=8192),
}
"""Products that a GPU takes about twice as long for as for the rest of an iteration. One takes longer to compute
than to start, so that the host, whose speed varies, does not hold them up."""
FEWEST = 2
"""Products in the training that is compared with it."""


def plant(graph: Graph, where: str, products: Products) -> Graph:
    """Returns the graph with additional products in one fragment, whose results stay the same."""
    import jax.numpy as jnp

    mixing = jnp.eye(products.width) * 0.5 + 0.001
    shape = (products.width,) if products.rows == 1 else (products.rows, products.width)

    def work(tree: Any) -> Any:
        """Zero, after products that depend on the numbers of a tree."""
        start = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree))
        first = jnp.full(shape, 1e-3) * start
        end = jax.lax.fori_loop(0, products.number, lambda _, x: jnp.tanh(x @ mixing), first)
        return 0.0 * jnp.sum(end)

    def environment(key: Any, state: Any, action: Any) -> Any:
        timestep = graph.environment(key, state, action)
        return timestep._replace(reward=timestep.reward + work(timestep.observation))

    def policy(weights: Any, key: Any, memory: Any, observation: Any, mask: Any) -> Any:
        return graph.policy(weights, key, memory, observation + work(observation), mask)

    def prepare(learner: Any, trajectory: Any, **others: Any) -> Any:
        steps = trajectory.steps
        rewards = steps.reward + jax.vmap(work)(steps.observation)[:, None]
        return graph.prepare(learner, trajectory._replace(steps=steps._replace(reward=rewards)), **others)

    def gradients(learner: Any, minibatch: Any) -> Any:
        found, metrics = graph.gradients(learner, minibatch)
        more = jnp.mean(jax.vmap(work)(minibatch.samples.observation))
        return jax.tree.map(lambda leaf: leaf + more, found), metrics

    def update(learner: Any, found: Any) -> Any:
        # Once all gradients are there: the work of some would run beside what computes the others.
        more = work(jax.lax.optimization_barrier(found))
        return graph.update(learner, jax.tree.map(lambda leaf: leaf + more, found))

    fragments = (environment, policy, prepare, gradients, update)
    return graph._replace(**{where: dict(zip(PLANTED, fragments, strict=True))[where]})


def planted(chosen: Any) -> Rows:
    """Two trainings take turns, one of them with more work: so both see the same noise of the machine."""
    envs, steps = (4096, 128) if chosen.platform == "gpu" else (256, 64)
    # One epoch, so that no operation takes most of the time: its noise would be as long as what is planted.
    sizes = {"num_envs": envs, "num_steps": steps, "update_epochs": 1}
    graph = rollmill.ppo("CartPole-v1", total_timesteps=2**36, **sizes)
    calibration = load_or_calibrate()
    for where in chosen.operation or PLANTED:
        many = (PRODUCTS_ON_GPU if chosen.platform == "gpu" else PRODUCTS)[where]
        # Both have the same instructions, so that all else is compiled alike.
        sides = tuple(_Side(plant(graph, where, each)) for each in (many._replace(number=FEWEST), many))
        for _ in range(chosen.repeats):
            for _ in range(ROUNDS):
                for _ in range(PLAIN_TURNS):
                    for side in sides:
                        side.run_plain()
                for side in reversed(sides):
                    side.run_profiled()
            row = _compared(where, *(side.quiet_time(calibration) for side in sides))
            row["turns"] = [side.turns for side in sides]
            print(
                f"{where}: an iteration {1e3 * row['added_seconds']:+.2f} ms, the operation "
                f"{1e3 * row['attributed_seconds']:+.2f} ms ({row['error']:+.1%}); another at most "
                f"{row['largest_other']:+.1%} of the iteration ({row['other']})",
                flush=True,
            )
            yield where, row


class QuietTime(NamedTuple):
    """The durations of a training while the machine has little other work."""

    iteration: float
    """Seconds of an iteration without the profiler."""
    operations: Mapping[str, float]
    """Seconds of each operation in it."""


class ProfiledTurn(NamedTuple):
    """A turn of a training with the profiler."""

    seconds: float
    """Of an iteration."""
    window: RecordedWindow
    waiting: float | None
    """Nanoseconds of an iteration in which an accelerator waits for the host; None on a CPU."""


class _Side:
    """One of two trainings that are compared, and its turns."""

    def __init__(self, graph: Graph) -> None:
        self._program = lower(graph)
        self._state = self._program.place(start_state(graph))
        self._recorder = TraceRecorder()
        self.turns: list[float] = []
        """Seconds of an iteration in each turn without the profiler."""
        self._profiled: list[ProfiledTurn] = []
        shortest = min(self._seconds(1) for _ in range(3))
        self._before, self._count, self._profiled_count = (
            max(2, round(seconds / shortest)) for seconds in (SETTLE_SECONDS, TURN_SECONDS, PROFILED_SECONDS)
        )

    def _seconds(self, count: int) -> float:
        """Returns the seconds of a call of the program, as the mean of a turn of so many."""
        begin = time.perf_counter()
        for _ in range(count):
            self._state, metrics = self._program.advance(self._state, self._program.iterations_per_call)
        metrics.block_until_ready()
        return (time.perf_counter() - begin) / count

    def run_plain(self) -> None:
        self._seconds(self._before)
        self.turns.append(self._seconds(self._count))

    def run_profiled(self) -> None:
        self._recorder.start()
        on_cpu = jax.default_backend() == "cpu"
        self._seconds(self._before if on_cpu else SETTLE_TURNS * self._profiled_count)  # CUDA graphs are made anew
        begin = time.monotonic_ns()
        seconds = self._seconds(self._profiled_count)
        end = time.monotonic_ns()
        if on_cpu:
            self._profiled.append(ProfiledTurn(seconds, self._recorder.stop(begin, end), None))
            return
        window, use = self._recorder.stop_with_use(begin, end, read=True)
        assert window is not None, "it was to be read"
        self._profiled.append(ProfiledTurn(seconds, window, (end - begin - use.working) / self._profiled_count))

    def quiet_time(self, calibration: Calibration) -> QuietTime:
        """Returns the lower quartile of turns without the profiler, beside the faster half of those with it.

        The machine's other work makes turns longer, and what several threads compute more than what one does.
        """
        iteration = quantiles(self.turns, n=4)[0]
        faster = sorted(self._profiled, key=lambda turn: turn.seconds)[: (len(self._profiled) + 1) // 2]
        pairs = [
            PairedWindow(
                1e9 * turn.seconds,
                1e9 * iteration,
                turn.window.times.program_events / self._profiled_count,
                turn.window.times.span_events / self._profiled_count,
                turn.waiting,
            )
            for turn in faster
        ]
        found = costs(
            pairs,
            inside=calibration.inside,
            in_idle_time=jax.default_backend() != "cpu",
            calibrated=calibration.event_nanoseconds,
        )
        shares = [self._shares(turn.window, found, iteration) for turn in faster]
        names = {name for each in shares for name in each}
        times = {name: iteration * median(each.get(name, 0.0) for each in shares) for name in names}
        return QuietTime(iteration, times)

    def _shares(self, window: RecordedWindow, found: EventCosts, iteration: float) -> Mapping[str, float]:
        """Returns the shares of an iteration by the innermost operation of each path."""
        sums: dict[str, float] = {}
        for operation in summary.operations(
            [summary.ProcessWindows("training", [window], self._profiled_count)], found, iteration
        ):
            name = next((part for part in reversed(operation.path) if part in PLANTED), operation.path[-1])
            sums[name] = sums.get(name, 0.0) + operation.seconds / iteration
        return sums


def _compared(where: str, before: QuietTime, after: QuietTime) -> dict[str, Any]:
    """Returns the differences between the two trainings."""
    names = {*before.operations, *after.operations}
    grown = {name: after.operations.get(name, 0.0) - before.operations.get(name, 0.0) for name in names}
    added, attributed = after.iteration - before.iteration, grown.pop(where)
    other = max(grown, key=lambda name: abs(grown[name]))
    return {
        "added_seconds": added,
        "attributed_seconds": attributed,
        "error": attributed / added - 1.0,
        "other": other,
        "largest_other": grown[other] / after.iteration,
        "grown": grown,
        "operations": [dict(each.operations) for each in (before, after)],
        "iteration_seconds": after.iteration,
    }


OFF_ITERATIONS, OFF_TURNS = 300, 20
"""Iterations of a turn, and turns of each kind for one of the `--repeats`."""


def off(chosen: Any) -> Rows:
    """Measures the shortest iterations, in which spans weigh most.

    `cost` is the median ratio of pairs, `cost_of_spans` the number of spans in an iteration times one's duration.
    """
    graph = rollmill.ppo("CartPole-v1", total_timesteps=2**32, num_envs=4, num_steps=8, update_epochs=1)
    program = lower(graph)
    state = program.place(start_state(graph))

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in dispatch_ahead(program, state, first=0, until=OFF_ITERATIONS):
            pass
        return (time.perf_counter() - begin) / OFF_ITERATIONS

    spans, none = operations.span, nullcontext()
    kinds = {"with spans": spans, "without": lambda name, category="python": none}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds()
    for turn in range(OFF_TURNS * chosen.repeats):
        for kind in sorted(kinds, reverse=turn % 2 == 0):
            operations.span = kinds[kind]
            found[kind].append(seconds())
    operations.span = spans
    cost = median(a / b for a, b in zip(found["with spans"], found["without"], strict=True)) - 1.0
    iteration = median(found["without"])
    print(f"an iteration of {1e6 * iteration:.0f} us takes {cost:+.2%} longer with spans", flush=True)

    opened = Counter[str]()

    def counted(name: str, category: str = "python") -> AbstractContextManager[object]:
        opened[name] += 1
        return spans(name, category)

    operations.span = counted
    seconds()
    operations.span = spans
    an_iteration, one_span = opened.total() / OFF_ITERATIONS, _seconds_of_a_span()
    cost_of_spans = an_iteration * one_span / iteration
    print(f"{an_iteration:.2f} spans of {1e9 * one_span:.0f} ns each: {cost_of_spans:.3%}", flush=True)
    row = {"cost": cost, "cost_of_spans": cost_of_spans, "spans_per_iteration": an_iteration}
    yield "ppo, CartPole-v1, 4 x 8", row | {"span_seconds": one_span, "iteration_seconds": found}


def _seconds_of_a_span() -> float:
    """Returns the duration of a span while nothing is recorded, with the loop around it."""
    loops = 100_000
    measured = timeit.repeat(
        "with operations.span('dispatch', 'dispatch'): pass", number=loops, repeat=7, globals=globals()
    )
    return median(measured) / loops


def survey(chosen: Any) -> Rows:
    for algorithm, environments in SURVEYED.items():
        if chosen.workload and algorithm not in chosen.workload:
            continue
        for environment, (placement, words) in itertools.product(environments, PLACEMENTS.items()):
            name = f"{algorithm}, {environment.split()[0]}, {placement}"
            try:
                found = profiled(f"{algorithm} {environment} {words} --fusion off".split())
            except Failed as failed:
                print(f"{name}: {failed}", flush=True)
                continue
            if missing := [note for note in found.notes if "left out" in note]:
                print(f"{name}: {missing}", flush=True)
                continue
            # Neither host nor device works; a coordinator of workers does not count.
            shares, whole = _shares(found.operations), whole_time(found)
            row = {"shares": shares, "idle": whole.share(whole.idle), "error": found.iteration.error}
            text = ", ".join(f"{group} {share:.0%}" for group, share in shares.items())
            print(f"{name}: {text}; idle {row['idle']:.0%}", flush=True)
            yield name, row | {"steps_per_second": found.steps_per_second}


def _shares(operations: Sequence[OperationTime]) -> dict[str, float]:
    """Returns the shares of the time in which host or device are at work."""
    total = sum(operation.seconds for operation in operations)
    shares = dict.fromkeys((*GROUPS, "host", "rest"), 0.0)
    for operation in operations:
        if (group := _group(operation.path)) is not None:
            shares[group] += operation.seconds / total
        else:
            shares["host"] += operation.host / total
            shares["rest"] += operation.device / total
    return shares


def _group(path: Sequence[str]) -> str | None:
    """Work inside a search belongs to the search: its simulation is that of copies."""
    if "search" in path:
        return "search"
    return next((name for part in reversed(path) for name, parts in GROUPS.items() if part in parts), None)


PARTS = {"errors": errors, "planted": planted, "off": off, "survey": survey}


def main() -> None:
    chosen = options(
        __doc__,
        {"part": one_of(*PARTS)},
        platform=one_of("cpu", "gpu", default="cpu"),
        repeats=5,
        operation=[str],
        workload=([str], "names of trainings, or algorithms of the survey"),
        add=(False, "keep what is there, if it is of the same commit"),
    )
    os.environ.setdefault("ROLLMILL_TYPE_CHECKS", "0")
    file = chosen.output / f"profiler-{chosen.part}-{chosen.platform}.json"
    rows: dict[str, dict[str, Any]] = {}
    chosen.output.mkdir(parents=True, exist_ok=True)
    for name, row in PARTS[chosen.part](chosen):
        with alone(chosen.output):
            if chosen.add:
                found = json.loads(file.read_text()) if file.exists() else {}
                rows = found["result"]["rows"] if found.get("commit") == this_commit() else {}
            before = rows.get(name, {}).get("profiles", [])
            rows[name] = row | ({"profiles": [*before, *row["profiles"]]} if "profiles" in row else {})
            write_result(file.stem, {"rows": rows}, chosen.output)


if __name__ == "__main__":
    main()
