"""Measures properties of a machine that profiles need, and caches them."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.json_data import parse_json
from rollmill.core.machine import hardware, versions
from rollmill.core.schema import read_as
from rollmill.profiling.correction import measure_event
from rollmill.profiling.recording import TraceRecorder
from rollmill.profiling.results import Ceilings

MAX_BYTES = 2**20
SIZES = {"cpu": (1024, 2**25), "gpu": (8192, 2**29)}
"""For each platform, the width of the square matrices to multiply, and the number of floats to add."""
CEILING_REPEATS = 5
METHOD = 2
"""Version of the measurement. Calibrations of other versions are not used."""


@dataclass(frozen=True)
class Calibration:
    """Measured properties of one machine with one version of JAX."""

    machine: str
    inside: float
    """Share of an event's cost that falls inside the event. See `rollmill.profiling.correction.measure_event`."""
    event_nanoseconds: float
    """Cost of recording an event in nanoseconds, or 0 if it could not be measured."""
    ceilings: Ceilings | None
    """Peak rates of the machine, or None if they could not be measured."""


def load_or_calibrate(*, fresh: bool = False) -> Calibration:
    """Returns the calibration of this machine. It is read from the cache or, if `fresh`, measured again within
    some seconds.
    """
    file, machine = cache_root() / "profiling" / "calibration.json", _machine()
    if not fresh and (kept := _read(file)) is not None and kept.machine == machine:
        return kept
    event = measure_event(TraceRecorder())
    found = Calibration(machine, event.inside, event.nanoseconds, measure_ceilings())
    if found.event_nanoseconds:
        _keep(file, found)
    return found


def _machine() -> str:
    """Identifies the machine and the software that a calibration is valid for."""
    here, installed = hardware(), versions()
    kinds = ", ".join(sorted({device["kind"] for device in here["devices"]}))
    software = f"jax {installed['jax']}, jaxlib {installed['jaxlib']}, method {METHOD}"
    return f"{here['cpu']}, {here['cores']} cores, {kinds}, {software}"


def _read(file: Path) -> Calibration | None:
    """Returns the cached calibration, or None if there is none that can be read."""
    try:
        text = folder_in_cache(file).read(file.name, limit=MAX_BYTES)
        return read_as(Calibration, parse_json(text, where=str(file)), where=str(file))
    except (OSError, CheckpointError, DataError):
        return None


def _keep(file: Path, found: Calibration) -> None:
    try:
        folder = folder_in_cache(file)
        folder.make()
        with folder.replacing(file.name, shared=True) as whole:
            whole.write(json.dumps(asdict(found)).encode())
    except (OSError, CheckpointError):
        return  # if the result cannot be stored, the next profile measures again


def measure_ceilings() -> Ceilings:
    """Measures a device's peak rates: the fastest of several float32 matrix products and vector additions.

    Products use the default precision of XLA, which is tf32 on NVIDIA GPUs.
    """
    width, length = SIZES.get(jax.default_backend(), SIZES["cpu"])
    matrix, vector = jnp.ones((width, width), jnp.float32), jnp.ones(length, jnp.float32)
    product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
    # Writes to the memory of the first vector, because the time to provide new memory would be measured as well.
    total = jax.jit(jnp.add, donate_argnums=0).lower(vector, vector).compile()
    sums = jnp.zeros(length, jnp.float32)

    def add() -> None:
        nonlocal sums
        sums = total(sums, vector).block_until_ready()

    multiply = _fastest(lambda: product(matrix, matrix).block_until_ready())
    return Ceilings(2.0 * width**3 / multiply, 3 * 4.0 * length / _fastest(add))


def _fastest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(CEILING_REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
