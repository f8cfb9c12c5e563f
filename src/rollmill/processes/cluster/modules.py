"""Sends the user's modules with a job to hosts that lack them or have another version."""

import importlib
import io
import os
import site
import stat
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmill.core.code_identity import PACKAGE, digest_of, place_of, places_of
from rollmill.core.temporary import TemporaryFolder

MAX_BYTES = 64 * 2**20
"""Maximum bytes of one package that is sent. Larger packages contain data that belongs on a shared file system."""

LEFT_OUT = ("__pycache__",)
"""Names of folders that are not sent, in addition to those that begin with a dot."""


class SentModules(NamedTuple):
    """User modules sent to the workers of a cluster."""

    digests: Mapping[str, str]
    """Digest of the source of each top-level package or module."""
    archive: bytes
    """The files of the modules, as a zip archive."""


NOTHING = SentModules({}, b"")


def modules_to_send(imports: Sequence[str]) -> SentModules:
    """Returns the user's modules that a run imports, and imported modules from the same folders, except installed
    packages.
    """
    named = {top: place for top, place in places_of(imports) if _is_of_user(place)}
    beside = {place.parent for place in named.values()}
    others = {
        top: place for top, place in places_of(_list_loaded()) if place.parent in beside and _is_of_user(place)
    }
    places = {top: place for top, place in {**named, **others}.items() if _size(place) <= MAX_BYTES}
    return SentModules({top: digest_of(place) for top, place in places.items()}, _archive(places.values()))


def missing_here(sent: SentModules) -> list[str]:
    """Returns the names of sent modules that this host lacks, or has in another version."""
    return [top for top, digest in sent.digests.items() if _compute_digest(top) != digest]


def unpack(sent: SentModules, names: Sequence[str]) -> TemporaryFolder:
    """Makes the named modules importable in this process, in preference to the host's own modules.

    Returns the folder that holds them.
    """
    folder = TemporaryFolder("modules")
    with zipfile.ZipFile(io.BytesIO(sent.archive)) as archive:
        members = [name for name in archive.namelist() if _top_of(name) in names]
        archive.extractall(folder.path, members)
    sys.path.insert(0, str(folder.path))
    importlib.invalidate_caches()
    return folder


def _top_of(member: str) -> str:
    head, _, rest = member.partition("/")
    return head if rest else head.partition(".")[0]


def _compute_digest(top: str) -> str | None:
    place = place_of(top)
    return None if place is None else digest_of(place)


def _list_loaded() -> list[str]:
    return [name for name in list(sys.modules) if "." not in name and name != "__main__"]


def _is_of_user(place: Path) -> bool:
    """Returns whether a source file belongs to neither Rollmill, Python, nor an installed package."""
    return place != PACKAGE and not any(place.is_relative_to(folder) for folder in _installation_folders())


def _installation_folders() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield Path(paths[name])
    yield from map(Path, [*site.getsitepackages(), site.getusersitepackages()])
    yield from (Path(folder) for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages"))


def _archive(places: Iterable[Path]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for place in places:
            for file in _files(place):
                archive.write(file, file.relative_to(place.parent).as_posix())
    return buffer.getvalue()


def _files(place: Path) -> Iterator[Path]:
    """Yields the regular files of a package, or the file of a module. Follows no link."""
    if not place.is_dir():
        yield place
        return
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if stat.S_ISREG(file.lstat().st_mode):
                yield file


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in _files(place))
