"""The study of `fusion.py` as it goes on: what is ready, how long it takes, what is known so far."""

import argparse
import gc
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

from fusion_sides import ON_JAX, Absent, Case, Running, Way, made_ready
from fusion_simulators import Simulator, differences
from measure import spread, write_result

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
    observed: tuple[int, ...] = (1, 64)
    """With as many oscillators as `wide` says, or else there were not enough to observe."""
    wide: int = 32


class Study:
    """The records so far, and where they are written."""

    def __init__(self, plan: Plan, options: argparse.Namespace) -> None:
        self.plan, self.options = plan, options
        self.began = time.monotonic()
        self.cases: list[dict[str, Any]] = []
        self.absent: list[dict[str, Any]] = []
        self.checks: dict[str, dict[str, float]] = {}
        self.compiler_fails: str | None = None
        """Why torch.compile did not work the first time; each failure would take its time."""

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
        write_result(self.options.name, result, directory=self.options.output)

    def check(self, simulator: Simulator) -> None:
        """Checks that all versions of a simulator compute the same.

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
                raise Absent(f"the budget of {self.options.budget:.0f} s was spent")
            if self.compiler_fails and "compile" in way.side:
                raise Absent(self.compiler_fails)
            return made_ready(case, way)
        except Exception as error:  # no side is to stop the others
            lines = str(error).strip().splitlines() or [""]
            reason = lines[0] if isinstance(error, Absent) else f"{type(error).__name__}: {lines[0]}"
            if way.side == "torch.compile" and not isinstance(error, Absent) and not self._has_compiled():
                self.compiler_fails = reason
            self.absent.append({**_labels(sweep, case, way), "reason": reason[:300]})
            print(f"{sweep}, {case.simulator.name} {case.num_envs}, {way}: absent: {reason[:300]}", flush=True)
            return None

    def _has_compiled(self) -> bool:
        return any(case["side"] == "torch.compile" for case in self.cases)

    def _time(self, sweep: str, case: Case, sides: dict[Way, Running]) -> None:
        for way, times in timed(sides).items():
            side = sides[way]
            rates = spread([side.env_steps / t for t in times])
            details = side.details | {"ended": side.ended(side.rollout())}
            self.cases.append({**_labels(sweep, case, way), **rates, **details})
            print(
                f"{sweep}, {case.simulator.name} {case.num_envs}, {way.side} {way.fused} {way.launch or ''}: "
                f"{rates['median'] / 1e6:.3f} M steps/s, {details}",
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


# --- one, the other, both ---------------------------------------------------------------------------

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
