"""Stores on disk which kernels were chosen, so that a run finds its stored program without generating kernels."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rollmill.core.errors import CheckpointError
from rollmill.core.installation import cache_root
from rollmill.core.schema import read_as
from rollmill.dataflow import iteration_digest
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import Implementation, KernelChoice, device_name, plain_kernels
from rollmill.programs.program_store import store_for

FOLDER = "choices"


@dataclass(frozen=True)
class StoredPart:
    """How one part of an iteration is computed, in the form of its JSON file."""

    fused: bool
    note: str | None
    launch: tuple[int, ...] | None


@dataclass(frozen=True)
class StoredChoice:
    """A choice of kernels in the form of its JSON file."""

    rollouts: StoredPart
    gradients: StoredPart
    saved: float | None
    """Seconds that the kernels save in an iteration, or None if they were not timed."""


class StoredChoices:
    """The stored choice of kernels for one request.

    Args:
        request: the arguments of the choice.
        sources: Python files that generate the kernels. None if nothing is stored.
    """

    def __init__(self, request: KernelRequest, sources: Iterable[Path] | None) -> None:
        self._request = request
        self._file = None if sources is None else _file_of(request, sources)

    def read(self) -> KernelChoice | None:
        """Returns the stored choice of kernels, or None. With this choice, the stored program can be found."""
        if self._file is None:
            return None
        from rollmill.fusion.cache import read_cached

        file = self._file
        stored = read_cached(file, lambda document: read_as(StoredChoice, document, where=str(file)))
        if stored is None:
            return None
        plain = plain_kernels(self._request.unroll)
        return plain._replace(
            rollouts=_implementation(stored.rollouts, plain.rollouts),
            gradients=_implementation(stored.gradients, plain.gradients),
            device=device_name(self._request.devices[0]),
            saved=stored.saved,
        )

    def keep(self, kernels: KernelChoice) -> None:
        """Stores a choice of kernels, if all kernels were tried."""
        if self._file is None or not kernels.is_whole:
            return
        from rollmill.fusion.cache import write_once

        choice = StoredChoice(_stored_part(kernels.rollouts), _stored_part(kernels.gradients), kernels.saved)
        # if the choice cannot be stored, the next run searches again
        with contextlib.suppress(OSError, CheckpointError):
            write_once(self._file, json.dumps(asdict(choice)))


def _file_of(request: KernelRequest, sources: Iterable[Path]) -> Path | None:
    """Returns the file of a choice. None where programs are not stored."""
    device = request.devices[0]
    known = [request.fusion, request.numerics, request.unroll, request.seeds_at_once, request.launches]
    name = store_for(device, iteration_digest(request.graph), ["choice", *known], sources).name
    return None if name is None else cache_root() / FOLDER / f"{name}.json"


def _stored_part(part: Implementation) -> StoredPart:
    return StoredPart(part.fused, part.note, part.launch)


def _implementation(part: StoredPart, plain: Implementation) -> Implementation:
    function = _nothing if part.fused else plain.function
    return Implementation(function, part.fused, part.note, part.launch)


def _nothing(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("a stored choice is for a stored program")
