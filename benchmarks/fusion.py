"""What vectorisation and fusion of a simulator's steps give, one without the other and both, on one GPU.

    python benchmarks/fusion.py run [--quick] [--device cpu] [--budget 330]
    python benchmarks/fusion.py draw

After Gleeson, Snider, Yang, Gabel, de Lara and Pekhimenko, "Optimizing Data Collection in Deep Reinforcement
Learning" (arXiv 2207.07736). Random actions are collected from CartPole-v1 and from a simulator of given
complexity (`oscillators.py`) by Gymnasium on the CPU, PyTorch (eager, in CUDA graphs, compiled, both), XLA (`vmap` and
`lax.scan`) and Rollmill's kernels. All do the same arithmetic, which is checked first, reset by themselves, and
write the same numbers into a trajectory; each draws random numbers as its library does. Sides take turns, and a
figure is the median of several times, each that of several rollouts in a row.

Three sweeps: over the number of environments, over the steps that one launch holds, over the simulator's
complexity. A side that cannot run, or has no time left within `--budget` seconds, is recorded as absent with its
reason. `run` writes results/fusion-study.json after each sweep and needs torch; `draw` makes
docs/figures/fusion-study.png from it, and needs matplotlib.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same GPU

import argparse
import gc
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from fusion_sides import ON_JAX, Absent, Case, Running, Way, made_ready
from fusion_simulators import Simulator, cartpole_simulator, differences, oscillators_simulator
from measure import RESULTS, spread, write_result
from oscillators import Complexity

WRITES = {
    "all": "of every step and environment: observation (float32, CartPole 4, Oscillators as many as observed), "
    "action (int32), reward (float32), terminated, truncated (1 byte each), before the next step overwrites them",
    "Gymnasium": "into NumPy arrays [T, E, ...] in host memory",
    "PyTorch": "each step's tensors are kept, feature-first in CartPole ([E] four times), else [E, m]; no copy",
    "XLA": "into arrays [T, E, ...]; with several calls, one such array of each call",
    "kernel": "into arrays [T, E, ...]; with several kernels, one such array of each",
    "random numbers": "actions and new episodes by Threefry (JAX), Philox (PyTorch), PCG64 (NumPy)",
    "resets": "JAX under vmap and PyTorch draw a new start in every step and select; the kernel where a warp or "
    "block has a finished episode, Gymnasium where it is needed",
}
REPEATS, TURN = 5, 0.08
"""Times that each side has a turn, and about how many seconds it lasts."""


class Plan(NamedTuple):
    """The sizes of the study."""

    num_steps: int = 128
    num_envs: tuple[int, ...] = (1, 16, 256, 4_096, 65_536)
    most_on_cpu: int = 4_096
    """Environments that Gymnasium is asked for."""
    at: int = 4_096
    """Environments of the two other sweeps."""
    fused: tuple[int, ...] = (1, 4, 16, 64, 128)
    most_compiled: int = 16
    """Steps that torch.compile and XLA are asked to put together; compilation takes too long beyond."""
    oscillators: tuple[int, ...] = (2, 8, 32, 64)
    substeps: tuple[int, ...] = (1, 4, 16, 64)
    observed: tuple[int, ...] = (1, 4, 16)


FULL = Plan()
QUICK = Plan(16, (1, 16), 16, 16, (1, 4, 16), 4, (2, 8), (1, 4), (1, 8))
LAUNCHES = {"few": [(16, 1), (32, 1)], "many": [(32, 1), (64, 2), (128, 4)]}


class Study:
    """The records so far, and where they are written."""

    def __init__(self, plan: Plan, options: argparse.Namespace) -> None:
        self.plan, self.options = plan, options
        self.began = time.monotonic()
        self.cases: list[dict[str, Any]] = []
        self.absent: list[dict[str, Any]] = []
        self.checks: dict[str, dict[str, float]] = {}

    def has_time(self) -> bool:
        """Whether another case may begin."""
        return time.monotonic() - self.began < self.options.budget

    def write(self) -> None:
        """All that is known."""
        result = {
            "plan": self.plan._asdict(),
            "versions": {name: _version(name) for name in ("torch", "gymnasium", "triton")},
            "writes": WRITES,
            "differences_after_a_step": self.checks,
            "cases": self.cases,
            "absent": self.absent,
            "multiplication": multiplication(self.cases),
            "seconds": round(time.monotonic() - self.began, 1),
        }
        write_result("fusion-study", result, directory=self.options.output)

    def check(self, simulator: Simulator) -> None:
        """That all versions of a simulator compute the same.

        Raises:
            SystemExit: they do not.
        """
        torch_too = _version("torch") is not None
        found = differences(simulator, torch_too=torch_too)
        print(f"{simulator.name}: greatest difference after a step, beside JAX: {found}", flush=True)
        if max(found.values()) > 1e-5:
            raise SystemExit(f"{simulator.name}: the sides compute different things: {found}")
        self.checks[simulator.name] = found

    def sweep(self, name: str, works: Sequence[tuple[Case, list[Way]]], **labels: Any) -> None:
        """Makes all ready that JAX compiles, side by side, then the rest; then times each case's ways in turns."""
        began = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [(n, way) for n, (_, ways) in enumerate(works) for way in ways if way.side in ON_JAX]
            ready = dict(
                zip(jobs, pool.map(lambda job: self._ready(name, works[job[0]][0], job[1]), jobs), strict=True)
            )
        print(f"{name}: JAX's sides are ready after {time.monotonic() - began:.0f} s", flush=True)
        for n, (case, ways) in enumerate(works):
            rest = {way: self._ready(name, case, way) for way in ways if way.side not in ON_JAX}
            sides = {way: rest.get(way) or ready.pop((n, way), None) for way in ways}
            self._time(name, case, {way: side for way, side in sides.items() if side is not None})
            rest.clear()
            sides.clear()
            gc.collect()
        self.write()

    def _ready(self, sweep: str, case: Case, way: Way) -> Running | None:
        try:
            if not self.has_time():
                raise Absent(f"the budget of {self.options.budget} s was spent")
            return made_ready(case, way)
        except Exception as error:  # no side is to stop the others
            lines = str(error).strip().splitlines() or [""]
            reason = lines[0] if isinstance(error, Absent) else f"{type(error).__name__}: {lines[0]}"
            self.absent.append({**_labels(sweep, case, way), "reason": reason[:300]})
            print(f"{sweep}, {case.simulator.name} {case.num_envs}, {way}: absent: {reason[:300]}", flush=True)
            return None

    def _time(self, sweep: str, case: Case, sides: dict[Way, Running]) -> None:
        seconds = timed(sides)
        for way, times in seconds.items():
            rates = spread([sides[way].env_steps / t for t in times])
            self.cases.append({**_labels(sweep, case, way), **rates, **sides[way].details})
            print(
                f"{sweep}, {case.simulator.name} {case.num_envs}, {way.side} {way.fused} {way.launch or ''}: "
                f"{rates['median'] / 1e6:.3f} M steps/s, {sides[way].details}",
                flush=True,
            )


def timed(sides: dict[Way, Running]) -> dict[Way, list[float]]:
    """Seconds of a rollout of each side, several times, in turns; a slow side has fewer turns."""
    calls = {}
    for way, side in sides.items():
        began = time.perf_counter()
        side.wait(side.rollout())
        once = time.perf_counter() - began
        calls[way] = max(1, min(50, round(TURN / once)))
    seconds: dict[Way, list[float]] = {way: [] for way in sides}
    for _ in range(REPEATS):
        for way, side in sides.items():
            if sum(seconds[way]) > 2.0:
                continue
            began = time.perf_counter()
            for _ in range(calls[way]):
                found = side.rollout()
            side.wait(found)
            seconds[way].append((time.perf_counter() - began) / calls[way])
    return seconds


def _labels(sweep: str, case: Case, way: Way) -> dict[str, Any]:
    complexity = case.simulator.complexity
    three = {} if complexity is None else complexity._asdict()
    return {
        "sweep": sweep,
        "simulator": case.simulator.name,
        **three,
        "num_envs": case.num_envs,
        "num_steps": case.num_steps,
        "side": way.side,
        "fused": way.fused,
        **({"launch": way.launch} if way.launch else {}),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- the sweeps ----------------------------------------------------------------------------------------


def over_environments(study: Study, simulator: Simulator, sizes: Sequence[int], compiled: int) -> None:
    """(a): all sides, a whole rollout in one launch where a side can."""
    plan, works = study.plan, []
    for num_envs in sizes:
        launches = LAUNCHES["few" if num_envs <= 4_096 else "many"]
        ways = [
            Way("XLA", 1),
            Way("XLA", min(16, plan.num_steps)),
            *(Way("kernel", plan.num_steps, launch) for launch in launches),
            Way("PyTorch", 1),
            Way("PyTorch, CUDA graph", plan.num_steps),
            Way("torch.compile", compiled),
            Way("torch.compile, CUDA graph", compiled),
        ]
        if num_envs <= plan.most_on_cpu:
            ways.append(Way("Gymnasium", 1))
        works.append((Case(simulator, num_envs, plan.num_steps, study.options.device), ways))
    study.sweep("environments", works)


def over_steps(study: Study, simulator: Simulator) -> None:
    """(b): as many steps in one launch as said, at one number of environments."""
    plan = study.plan
    few = [count for count in plan.fused if count <= plan.most_compiled]
    ways = [
        *(Way("kernel", count, (32, 1)) for count in plan.fused),
        *(Way("XLA", count) for count in few),
        *(Way("XLA, calls", count) for count in plan.fused),
        *(Way("PyTorch, CUDA graph", count) for count in plan.fused),
        *(Way(side, count) for count in few for side in ("torch.compile", "torch.compile, CUDA graph")),
    ]
    study.sweep("steps fused", [(Case(simulator, plan.at, plan.num_steps, study.options.device), ways)])


def over_complexity(study: Study) -> None:
    """(c): state, operations and memory of a step, one after the other, around one simulator."""
    plan, base = study.plan, Complexity()
    axes = {
        "operations": [base._replace(substeps=count) for count in plan.substeps],
        "state": [
            base._replace(oscillators=count, observed=min(count, base.observed)) for count in plan.oscillators
        ],
        "memory": [base._replace(observed=count) for count in plan.observed],
    }
    for complexities in axes.values():
        works = []
        for complexity in complexities:
            simulator = oscillators_simulator(complexity)
            if simulator.name in study.checks:
                continue
            study.check(simulator)
            unroll = max(1, min(16, 64 // complexity.substeps))
            ways = [
                Way("XLA", 1),
                *([Way("XLA", unroll)] if unroll > 1 else []),
                Way("kernel", plan.num_steps, (32, 1)),
                Way("PyTorch", 1),
                Way("PyTorch, CUDA graph", plan.num_steps),
            ]
            if complexity.substeps <= 16:
                ways += [Way("torch.compile", 4), Way("torch.compile, CUDA graph", 4)]
            works.append((Case(simulator, plan.at, plan.num_steps, study.options.device), ways))
        study.sweep("complexity", works)


PAIRS = {
    "XLA and kernel": (("XLA", 1), ("kernel", None)),
    "PyTorch and torch.compile, CUDA graph": (("PyTorch", 1), ("torch.compile, CUDA graph", None)),
}


def multiplication(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times one environment unfused: vectorised alone, fused alone, both, and the product of the two."""
    best: dict[tuple, float] = {}
    for case in cases:
        if case["sweep"] == "environments":
            for fused in (case["fused"], None):
                key = case["simulator"], case["num_envs"], case["side"], fused
                best[key] = max(best.get(key, 0.0), case["median"])
    found = []
    for simulator, num_envs in dict.fromkeys(key[:2] for key in best):
        for name, (plain, fused) in PAIRS.items():
            rates = [best.get((simulator, n, *side)) for side in (plain, fused) for n in (1, num_envs)]
            if all(rates):
                one, many, one_fused, many_fused = rates
                alone, steps = many / one, one_fused / one
                row = {"vectorised": alone, "fused": steps, "product": alone * steps, "both": many_fused / one}
                found.append({"simulator": simulator, "num_envs": num_envs, "sides": name, **row})
    return found


def run(options: argparse.Namespace) -> None:
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("JAX sees no GPU here; --device cpu runs what can be run without one.")
    plan = QUICK if options.quick else FULL
    study = Study(plan, options)
    cartpole, base = cartpole_simulator(), oscillators_simulator(Complexity())
    study.check(cartpole)
    over_environments(study, cartpole, plan.num_envs, plan.most_compiled)
    over_steps(study, cartpole)
    over_complexity(study)
    over_environments(study, base, [n for n in plan.num_envs if n != 16], 4)
    print(f"{len(study.cases)} measured, {len(study.absent)} absent, {time.monotonic() - study.began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--output", type=Path, default=RESULTS)
    running.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    running.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    running.add_argument("--budget", type=float, default=330, help="seconds after which no case begins")
    running.set_defaults(do=run)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--results", type=Path, default=RESULTS)
    drawing.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    drawing.set_defaults(do=draw)
    options = parser.parse_args()
    options.do(options)


def draw(options: argparse.Namespace) -> None:
    from fusion_figure import figure_of

    found = json.loads((options.results / "fusion-study.json").read_text())["result"]
    figure_of(found, options.docs / "figures" / "fusion-study.png")


if __name__ == "__main__":
    main()
