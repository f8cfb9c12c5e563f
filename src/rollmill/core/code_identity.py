"""Describes the code of a process with digests and versions, so that two processes can compare their code."""

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.machine import versions

PACKAGE = Path(__file__).parents[1]
SHOWN_DIGITS = 16
"""Number of digits of a digest that messages show."""


class CodeIdentity(NamedTuple):
    """Digests of the Rollmill code in a process, and versions of the packages that affect results."""

    source: str
    """Digest of Rollmill's source files."""
    versions: Mapping[str, str | None]

    def differences(self, other: "CodeIdentity") -> list[str]:
        """Returns one line per difference from another process's code, such as "jax 0.10.2 here, 0.10.1 there"."""
        names = [name for name in self.versions if not _same_version(name, self.versions, other.versions)]
        told = [f"{name} {self.versions[name]} here, {other.versions.get(name)} there" for name in names]
        if self.source != other.source:
            here, there = self.source[:SHOWN_DIGITS], other.source[:SHOWN_DIGITS]
            told.append(f"source of rollmill {here} here, {there} there")
        return told


def _same_version(name: str, ours: Mapping[str, str | None], theirs: Mapping[str, str | None]) -> bool:
    """Returns whether both processes have the same version of package `name`, or one of them lacks the package."""
    mine, other = ours.get(name), theirs.get(name)
    if mine is None or other is None:
        return True
    parts = 2 if name == "python" else None  # a bug-fix release of Python changes no results
    return mine.split(".")[:parts] == other.split(".")[:parts]


@functools.cache
def own_code() -> CodeIdentity:
    """Returns the identity of this process's code, as it was at the first call of this function."""
    return CodeIdentity(digest_of(PACKAGE), versions())


def digest_of(place: Path) -> str:
    """Returns the digest of a source file, or of all `*.py` files in and below a folder."""
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    total = hashlib.sha256()
    for file in files:
        name = file.relative_to(place).as_posix() if place.is_dir() else file.name
        total.update(f"{name}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def place_of(module: str) -> Path | None:
    """Returns the folder of a top-level package or the file of a module, without importing it.

    Returns None if there is no source.
    """
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(module)
    folders = list(getattr(spec, "submodule_search_locations", None) or ())
    if folders:
        return Path(folders[0])
    origin = getattr(spec, "origin", None) or getattr(loaded, "__file__", None)
    return Path(origin) if origin and Path(origin).is_file() else None


def digests_of(modules: Sequence[str]) -> dict[str, str]:
    """Maps the top-level packages or modules of the given modules to their digests, if they have source."""
    return {top: digest_of(place) for top, place in places_of(modules)}


def places_of(modules: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yields each top-level package or module that contains one of the given modules, and its source."""
    for top in dict.fromkeys(module.partition(".")[0] for module in modules):
        if (place := place_of(top)) is not None:
            yield top, place


def code_from_json(fields: Any) -> CodeIdentity | None:
    """Returns the code identity that another process sent as JSON, or None if the JSON is invalid."""
    match fields:
        case {"source": str(source), "versions": dict(known)}:
            return CodeIdentity(source, {str(name): text and str(text) for name, text in known.items()})
    return None
