"""Gains of vectorisation and fusion of a simulator's steps, one without the other and both, on one GPU.

    python benchmarks/fusion.py [--quick] [--device cpu] [--budget 330] [--sweeps complexity]

After Gleeson, Snider, Yang, Gabel, de Lara and Pekhimenko, "Optimizing Data Collection in Deep Reinforcement
Learning" (arXiv 2207.07736). Random actions are collected from CartPole-v1 and from a simulator of given
complexity (`oscillators.py`) by Gymnasium on the CPU, PyTorch (eager, in CUDA graphs, compiled, both), XLA
(`vmap` and `lax.scan`) and Rollmill's kernels. All do the same arithmetic, which is checked first, reset by
themselves, and write the same numbers into a trajectory; each draws random numbers as its library does. Sides
take turns, and a figure is the median of several times, each that of several rollouts in a row.

Three sweeps: over the number of environments, over the steps that one launch holds, over the simulator's
complexity. A side that cannot run, or has no time left within `--budget` seconds, is recorded as absent with its
reason. Needs torch. Writes results/fusion-study.json (or another `--name`) after each sweep.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same GPU

import gc
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import jax
from fusion_sides import ON_JAX, Absent, Case, Running, Way, made_ready
from fusion_simulators import Simulator, cartpole_simulator, differences, oscillators_simulator
from measure import one_of, options, some_of, spread, write_result
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
REPEATS, TURN_SECONDS = 5, 0.08
"""Turns of each side, and about how long one lasts."""


class Plan(NamedTuple):
    """The sizes of the study."""

    num_steps: int = 128
    num_envs: tuple[int, ...] = (1, 16, 256, 4_096, 65_536)
    most_on_cpu: int = 4_096
    """Limit of Gymnasium's environments."""
    at: int = 4_096
    """Environments of the two other sweeps."""
    fused: tuple[int, ...] = (1, 4, 16, 64, 128)
    most_compiled: int = 16
    """Limit of the steps that torch.compile and XLA put together; compilation takes too long beyond."""
    oscillators: tuple[int, ...] = (2, 8, 32, 64)
    substeps: tuple[int, ...] = (1, 4, 16, 64)
    observed: tuple[int, ...] = (1, 64)
    """With `wide` oscillators, of which there are enough to observe."""
    wide: int = 32


QUICK = Plan(16, (1, 16), 16, 16, (1, 4, 16), 4, (2, 8), (1, 4), (1, 8), 8)
SWEEPS = ("environments", "steps", "complexity", "oscillators")
"""The last is the first once more, of Oscillators."""


class Study:
    """The records so far, and their file."""

    def __init__(self, plan: Plan, chosen: Any) -> None:
        self.plan, self.chosen, self.began = plan, chosen, time.monotonic()
        self.cases: list[dict[str, Any]] = []
        self.absent: list[dict[str, Any]] = []
        self.checks: dict[str, dict[str, float]] = {}
        self.compiler_fails: str | None = None
        """Why torch.compile failed the first time; it is not tried again."""

    def case(self, simulator: Simulator, num_envs: int) -> Case:
        return Case(simulator, num_envs, self.plan.num_steps, self.chosen.device)

    def write(self) -> None:
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
        write_result(self.chosen.name, result, self.chosen.output)

    def check(self, simulator: Simulator) -> None:
        """Exits unless all versions of a simulator compute the same."""
        found = differences(simulator, torch_too=_version("torch") is not None)
        print(f"{simulator.name}: greatest difference after a step, beside JAX: {found}", flush=True)
        if max(found.values()) > 1e-5:
            raise SystemExit(f"{simulator.name}: the sides compute different things: {found}")
        self.checks[simulator.name] = found

    def sweep(self, name: str, works: Sequence[tuple[Case, list[Way]]]) -> None:
        """Compiles JAX's sides side by side, then makes the others ready and times each case's ways in turns."""
        began = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [(n, way) for n, (_, ways) in enumerate(works) for way in ways if way.side in ON_JAX]
            made = pool.map(lambda job: self._ready(name, works[job[0]][0], job[1]), jobs)
            ready = dict(zip(jobs, made, strict=True))
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
            if time.monotonic() - self.began >= self.chosen.budget:
                raise Absent(f"the budget of {self.chosen.budget:.0f} s was spent")
            if self.compiler_fails and "compile" in way.side:
                raise Absent(self.compiler_fails)
            return made_ready(case, way)
        except Exception as error:  # no side is to stop the others
            lines = str(error).strip().splitlines() or [""]
            reason = lines[0] if isinstance(error, Absent) else f"{type(error).__name__}: {lines[0]}"
            compiles = any(case["side"] == "torch.compile" for case in self.cases)
            if way.side == "torch.compile" and not isinstance(error, Absent) and not compiles:
                self.compiler_fails = reason
            self.absent.append({**_labels(sweep, case, way), "reason": reason[:300]})
            print(f"{sweep}, {case.simulator.name} {case.num_envs}, {way}: absent: {reason[:300]}", flush=True)
            return None

    def _time(self, sweep: str, case: Case, sides: dict[Way, Running]) -> None:
        for way, times in timed(sides).items():
            side = sides[way]
            rates = spread([side.env_steps / t for t in times])
            details = side.details | {"ended": side.ended(side.rollout())}
            self.cases.append({**_labels(sweep, case, way), **rates, **details})
            named = f"{sweep}, {case.simulator.name} {case.num_envs}, {way.side} {way.fused} {way.launch or ''}"
            print(f"{named}: {rates['median'] / 1e6:.3f} M steps/s, {details}", flush=True)


def timed(sides: dict[Way, Running]) -> dict[Way, list[float]]:
    """Returns the seconds of a rollout of each side, several times, in turns; a slow side has fewer turns."""

    def seconds_of(side: Running, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            found = side.rollout()
        side.wait(found)
        return (time.perf_counter() - began) / calls

    once = {way: seconds_of(side, 1) for way, side in sides.items()}
    calls = {way: max(1, min(50, round(TURN_SECONDS / seconds))) for way, seconds in once.items()}
    seconds: dict[Way, list[float]] = {way: [] for way in sides}
    for _ in range(REPEATS):
        for way, side in sides.items():
            if sum(seconds[way]) <= 2.0:
                seconds[way].append(seconds_of(side, calls[way]))
    return seconds


def _labels(sweep: str, case: Case, way: Way) -> dict[str, Any]:
    complexity = case.simulator.complexity
    three = {} if complexity is None else complexity._asdict()
    launch = {"launch": way.launch} if way.launch else {}
    sizes = {"num_envs": case.num_envs, "num_steps": case.num_steps, "side": way.side, "fused": way.fused}
    return {"sweep": sweep, "simulator": case.simulator.name, **three, **sizes, **launch}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


PAIRS = {
    "XLA and kernel": (("XLA", 1), ("kernel", None)),
    "PyTorch and torch.compile, CUDA graph": (("PyTorch", 1), ("torch.compile, CUDA graph", None)),
}


def multiplication(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rates over one environment unfused: vectorised alone, fused alone, both, and the product of the
    two.
    """
    best: dict[tuple, float] = {}
    for case in cases:
        if case["sweep"] == "environments":
            for fused in (case["fused"], None):
                key = case["simulator"], case["num_envs"], case["side"], fused
                best[key] = max(best.get(key, 0.0), case["median"])
    found = []
    for simulator, num_envs in dict.fromkeys(key[:2] for key in best):
        for name, pair in PAIRS.items():
            rates = [best.get((simulator, n, *side)) for side in pair for n in (1, num_envs)]
            if all(rates):
                one, many, one_fused, many_fused = rates
                alone, steps = many / one, one_fused / one
                row = {"vectorised": alone, "fused": steps, "product": alone * steps, "both": many_fused / one}
                found.append({"simulator": simulator, "num_envs": num_envs, "sides": name, **row})
    return found


# --- the sweeps --------------------------------------------------------------------------------------------


def over_environments(study: Study, simulator: Simulator, sizes: Sequence[int], compiled: int) -> None:
    """Runs all sides, with a whole rollout in one launch where a side can."""
    plan, works = study.plan, []
    for num_envs in sizes:
        launches = [(16, 1), (32, 1)] if num_envs <= 4_096 else [(32, 1), (64, 2), (128, 4)]
        ways = [Way("XLA", 1), Way("XLA", plan.most_compiled)]
        ways += [Way("kernel", plan.num_steps, launch) for launch in launches]
        ways += [Way("PyTorch", 1), Way("PyTorch, CUDA graph", plan.num_steps)]
        ways += [Way("torch.compile", compiled), Way("torch.compile, CUDA graph", compiled)]
        ways += [Way("Gymnasium", 1)] if num_envs <= plan.most_on_cpu else []
        works.append((study.case(simulator, num_envs), ways))
    study.sweep("environments", works)


def over_steps(study: Study, simulator: Simulator) -> None:
    """Runs each side with several numbers of steps in one launch, at one number of environments."""
    plan = study.plan
    few = [count for count in plan.fused if count <= plan.most_compiled]
    ways = [*(Way("kernel", count, (32, 1)) for count in plan.fused), *(Way("XLA", count) for count in few)]
    ways += [Way(side, count) for side in ("XLA, calls", "PyTorch, CUDA graph") for count in plan.fused]
    ways += [Way(side, count) for count in few for side in ("torch.compile", "torch.compile, CUDA graph")]
    study.sweep("steps fused", [(study.case(simulator, plan.at), ways)])


def over_complexity(study: Study) -> None:
    """Varies operations, state and memory of a step, one after the other, around one simulator."""
    plan, base = study.plan, Complexity()
    observed = lambda count: {"oscillators": count, "observed": min(count, base.observed)}
    axes = [
        [base._replace(substeps=count) for count in plan.substeps],
        [base._replace(**observed(count)) for count in plan.oscillators],
        [base._replace(oscillators=plan.wide, observed=count) for count in plan.observed],
    ]
    for complexities in axes:
        works = []
        for complexity in complexities:
            simulator = oscillators_simulator(complexity)
            if simulator.name in study.checks:
                continue
            study.check(simulator)
            unroll = max(1, min(plan.most_compiled, 64 // complexity.substeps))
            ways = [Way("XLA", 1), *([Way("XLA", unroll)] if unroll > 1 else [])]
            ways += [Way("kernel", plan.num_steps, (32, 1)), Way("PyTorch", 1)]
            ways += [Way("PyTorch, CUDA graph", plan.num_steps)]
            if complexity.substeps <= 16:
                ways += [Way("torch.compile", 4), Way("torch.compile, CUDA graph", 4)]
            works.append((study.case(simulator, plan.at), ways))
        study.sweep("complexity", works)


def main() -> None:
    chosen = options(
        __doc__,
        device=one_of("cuda", "cpu", default="cuda"),
        quick=(False, "small sizes, to see that all runs"),
        budget=(330.0, "seconds after which no case begins"),
        sweeps=some_of(SWEEPS),
        name="fusion-study",
    )
    if chosen.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("JAX sees no GPU here; --device cpu runs what can be run without one.")
    plan = QUICK if chosen.quick else Plan()
    study, cartpole = Study(plan, chosen), cartpole_simulator()
    study.check(cartpole)
    if "environments" in chosen.sweeps:
        over_environments(study, cartpole, plan.num_envs, plan.most_compiled)
    if "steps" in chosen.sweeps:
        over_steps(study, cartpole)
    if "complexity" in chosen.sweeps:
        over_complexity(study)
    if "oscillators" in chosen.sweeps:
        over_environments(study, oscillators_simulator(Complexity()), [n for n in plan.num_envs if n != 16], 4)
    print(f"{len(study.cases)} measured, {len(study.absent)} absent, {time.monotonic() - study.began:.0f} s")


if __name__ == "__main__":
    main()
