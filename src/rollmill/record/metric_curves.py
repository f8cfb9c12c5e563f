"""One metric over steps and seconds, from the lines of a run."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rollmill.core.errors import CheckpointError
from rollmill.record.learning_curves import MOST_BYTES
from rollmill.record.run_directory import METRICS, RunDirectory

LINE_START = ("iteration", "env_steps", "seconds")
"""Numbers of every line that count how far a training is."""


class MetricAt(NamedTuple):
    """A metric after some environment steps, and after some seconds of training."""

    env_steps: float
    seconds: float
    value: float


def metric_curve(run: RunDirectory, metric: str) -> list[MetricAt]:
    """A metric of all lines that have it as a finite number, the oldest first; damaged lines are passed over."""
    decoder, found = _decoder(metric), []
    for line in _lines(run):
        try:
            read = decoder.decode(line)
            env_steps = float(read.env_steps)
        except (msgspec.DecodeError, OverflowError, RecursionError):
            continue
        if read.value is not None and math.isfinite(read.value):
            found.append(MetricAt(env_steps, read.seconds, read.value))
    return found


def metric_names(run: RunDirectory) -> set[str]:
    """Names of the metrics that a run has; empty if it has no line yet."""
    names: set[str] = set()
    for line in _lines(run):
        try:
            read = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            continue
        names.update(name for name, value in read.items() if isinstance(value, int | float))
    return names - set(LINE_START)


@functools.cache
def _decoder(metric: str) -> msgspec.json.Decoder:
    """Reads three numbers of a line, and passes over the others."""
    known = ("value", float | None, msgspec.field(name=metric, default=None))
    return msgspec.json.Decoder(msgspec.defstruct("MetricLine", [("env_steps", int), ("seconds", float), known]))


def _lines(run: RunDirectory) -> Iterator[bytes]:
    try:
        with run.folder.reading(METRICS) as file:
            while line := file.readline(MOST_BYTES):
                if len(line) == MOST_BYTES and not line.endswith(b"\n"):
                    raise CheckpointError(
                        f"{run.root / METRICS} cannot be read: a line has more than {MOST_BYTES:,} bytes."
                    )
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{run.root / METRICS} cannot be read: {error.strerror or error}.") from error
