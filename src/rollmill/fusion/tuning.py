"""Finds the fastest launch of a rollout's kernel by timing, once for a device, a size and these versions."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Weights, collect
from rollmill.fusion.kernels import cache_folder
from rollmill.fusion.leaves import each_struct, to_raw
from rollmill.fusion.rollout import Launch, fused_collect, rollout_kernel, rollout_step, run_kernel
from rollmill.fusion.triton_source import Numerics

LAUNCHES = (Launch(16, 1), Launch(32, 1), Launch(32, 2), Launch(64, 2), Launch(64, 4), Launch(128, 4))
REPEATS = 5


class Tuned(NamedTuple):
    """What timing has found."""

    launch: Launch
    seconds: float
    """Of a rollout in one kernel."""
    unfused_seconds: float
    """Of the same by XLA alone."""


def tune_rollout(
    graph: Graph, weights: Weights, collector: Collector, key: Key, numerics: Numerics, *, unroll: int
) -> Tuned:
    """The fastest launch for these environments on the device that they lie on.

    Raises:
        CannotFuse: if the graph's policy and environment cannot be one kernel.
        RuntimeError: if no launch runs on this device; the text is that of the last one's error.
    """
    file = cache_folder() / "launches" / f"{_identity(graph, weights, collector, numerics, unroll)}.json"
    if file.exists():
        found = json.loads(file.read_text())
        return Tuned(Launch(*found["launch"]), found["seconds"], found["unfused_seconds"])
    arguments = weights, collector, key
    unfused = _seconds(partial(collect, graph, unroll=unroll), arguments)
    times, last = {}, None
    for launch in LAUNCHES:
        run = partial(run_kernel, launch=launch, numerics=numerics)
        try:
            times[launch] = _seconds(partial(fused_collect, graph, run=run), arguments)
        except (RuntimeError, ValueError) as error:  # too many registers or too much memory on the chip
            last = error
    if not times:
        raise RuntimeError(f"no launch of the kernel runs on this device: {last}") from last
    best = min(times, key=lambda launch: times[launch])
    tuned = Tuned(best, times[best], unfused)
    _write(file, tuned)
    return tuned


def _seconds(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _identity(graph: Graph, weights: Weights, collector: Collector, numerics: Numerics, unroll: int) -> str:
    """A name for all that the times depend on."""
    step = rollout_step(graph, weights, each_struct(collector))
    keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), "uint32")
    steps = graph.loops.num_steps
    kernel, _ = rollout_kernel(step, to_raw(collector), keys, steps, launch=Launch(), numerics=numerics)
    device = next(iter(collector.index.devices()))
    packages = [version(name) for name in ("jax", "jaxlib", "triton", "jax-triton")]
    known = [kernel.source, kernel.constants, list(map(str, LAUNCHES)), device.device_kind, packages, unroll]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]


def _write(file: Path, tuned: Tuned) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(tuned._asdict()))
    os.replace(part, file)
