"""Properties of a machine that profiles need, measured once and cached."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.json_data import parse_json
from rollmill.core.machine import hardware, versions
from rollmill.core.schema import read_as
from rollmill.profiling.ceilings import measure_ceilings
from rollmill.profiling.correction import measure_event
from rollmill.profiling.recording import TraceRecorder
from rollmill.profiling.results import Ceilings

MAX_BYTES = 2**20
METHOD = 2
"""Version of the measurement. Calibrations by other versions are not used."""


@dataclass(frozen=True)
class Calibration:
    """Measured properties of one machine with one version of the compiler."""

    machine: str
    inside: float
    """Share of an event's cost that lies inside it. See `rollmill.profiling.correction.measure_event`."""
    event_nanoseconds: float
    """The cost of an event, or 0 if it could not be measured."""
    ceilings: Ceilings | None
    """None if they could not be measured."""


def calibrated(*, fresh: bool = False) -> Calibration:
    """Returns the calibration of this machine, from the cache or, if `fresh`, by a measurement of some seconds."""
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
        return  # it is measured again next time
