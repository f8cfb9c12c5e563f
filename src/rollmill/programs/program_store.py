"""Compiled programs on disk, found by what their code depends on, and loaded without tracing or lowering them.

JAX's own cache is asked for a program that was traced and lowered, which takes longer than loading it. Here a
program is found by a digest of its operations, of JAX's version and settings, and of the device. A program that
depends on anything else is not stored: one that calls a function of the host, or code that the process registers.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from rollmill.core.errors import CheckpointError
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.machine import usable_cores, version_of
from rollmill.core.threefry import small_programs
from rollmill.programs.cache import WITH_NAMES
from rollmill.programs.compiler_options import CompilerOptions

FOLDER = "programs"
MAX_BYTES = 2**28
"""Bytes of a stored program, compressed."""

PLATFORMS = ("cpu",)
"""Platforms on which loaded programs were compared with compiled ones."""

MIN_COMPILE_SECONDS = 0.3
"""Programs that compile faster are not stored, as in JAX's cache."""

OWN_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "cu_threefry2x32_ffi"}
"""Calls out of a program that JAX knows without lowering one."""

CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""The event by which JAX reports a program from its cache."""

NO_PART = re.compile("cache|log|dump|trace|state_dir", re.IGNORECASE)
"""Settings that change no program."""

PREFIXES = ("JAX_", "XLA_", "TF_", "NVIDIA_", "EQX_", "ROLLMILL_")
"""Beginnings of the names of environment variables that matter."""


class ProgramStore:
    """The place of a stored program.

    Args:
        name: digest of all that the program depends on. None: it is not stored.
        device: the device that it runs on.
    """

    def __init__(self, name: str | None, device: Any = None) -> None:
        self.name, self.device = name, device

    def program(self, make: "StorableProgram") -> Callable[[], jax.stages.Compiled]:
        """Returns a function that loads or compiles a program, in any thread.

        A program that is not stored is lowered before.
        """
        file = self._file(make)
        if file is not None and _is_there(file):
            return lambda: self._loaded(file, make) or self._kept(file, make, make.lower(self.name))
        lowered = make.lower(self.name)
        return lambda: self._kept(file, make, lowered)

    def _loaded(self, file: Path, make: "StorableProgram") -> jax.stages.Compiled | None:
        try:
            folder = folder_in_cache(file)
            digest, _, packed = folder.read(file.name, limit=MAX_BYTES).partition(b"\n")
            if digest != _digest(packed):
                folder.remove(file.name)
                return None
            taken, returned = jax.tree.structure((tuple(make.arguments), {})), jax.tree.structure(make.result())
            here = {"backend": self.device.client, "execution_devices": [self.device]}
            return deserialize_and_load(zlib.decompress(packed), taken, returned, **here)
        except Exception:  # whatever a program of another version raises: it is compiled again
            return None

    def _kept(
        self, file: Path | None, make: "StorableProgram", lowered: jax.stages.Lowered
    ) -> jax.stages.Compiled:
        """Compiles a program, and stores it unless it depends on more than the store's name, or compiles fast."""
        began = time.perf_counter()
        with _cache_hits() as hits:
            compiled = lowered.compile(dict(make.options))
        is_short = time.perf_counter() - began < MIN_COMPILE_SECONDS
        if file is None or hits or is_short or not calls_of(lowered.as_text()) <= OWN_CALLS:
            return compiled
        with contextlib.suppress(OSError, CheckpointError, ValueError, NotImplementedError, RuntimeError):
            packed = zlib.compress(serialize(compiled)[0], level=1)
            folder = folder_in_cache(file)
            folder.make()
            with folder.replacing(file.name, shared=True) as whole:
                whole.write(_digest(packed) + b"\n" + packed)
        return compiled

    def _file(self, make: "StorableProgram") -> Path | None:
        if self.name is None:
            return None
        how = _digest(json.dumps([sorted(make.options.items()), sorted(make.settings)]).encode()).decode()[:16]
        return cache_root() / FOLDER / f"{make.part}-{self.name}-{how}"


class StorableProgram(NamedTuple):
    """A program to load or to compile."""

    part: str
    """What it is for in a training."""
    function: Callable[..., Any]
    arguments: Sequence[Any]
    """Their types."""
    result: Callable[[], Any]
    """Returns its result or the types of it: a stored program needs the structure."""
    options: CompilerOptions
    """Options of the compiler."""
    settings: Mapping[str, Any] = {}
    """Arguments of `jax.jit`."""
    runs_once: bool = False
    """Whether it runs once only, so that a small program is better than a fast one."""

    def lower(self, name: str | None) -> jax.stages.Lowered:
        """Traces and lowers it.

        A program to store has the name of its place, so that JAX's cache does not know it under another one: XLA
        writes only a part of a program that it has loaded.
        """

        def program(*args: Any) -> Any:
            return self.function(*args)

        program.__name__ = self.part if name is None else f"{self.part}_{name}"
        with small_programs() if self.runs_once else contextlib.nullcontext():
            return jax.jit(program, **self.settings).trace(*self.arguments).lower()


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Notes programs that this thread takes from JAX's cache inside of it."""
    thread, hits = threading.get_ident(), []

    def hear(event: str, **_: str | int) -> None:
        if event == CACHE_HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(hear)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(hear)


def _is_there(file: Path) -> bool:
    """Returns whether there is a file. Nobody can tell in a folder of another user."""
    try:
        return file.exists()
    except OSError:
        return False


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


NO_STORE = ProgramStore(None)
"""The store of programs that depend on more than a digest of them."""


def store_for(device: Any, digest: str | None, known: Sequence[object], sources: Sequence[Path]) -> ProgramStore:
    """Returns the store of a program.

    Args:
        device: the only one that computes it.
        digest: of its operations; None if it depends on more.
        known: what else it depends on, as JSON takes it.
        sources: files of Python that make the program of these operations.
    """
    settings = jax.config.values
    is_on = settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]
    if digest is None or not is_on or settings[WITH_NAMES] or device.platform not in PLATFORMS:
        return NO_STORE
    around = [surroundings(device), [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]]
    text = json.dumps([digest, *known, around])
    return ProgramStore(hashlib.sha256(text.encode()).hexdigest()[:32], device)


def surroundings(device: Any) -> list[object]:
    """Returns what every program of a device depends on: versions, settings, variables and the processor."""
    client = device.client
    return [
        *map(version_of, ("jax", "jaxlib", "llvmlite")),
        platform.python_version(),
        [client.platform, client.platform_version, device.device_kind],
        _settings(),
        _variables(os.environ),
        [*_processor(), os.cpu_count(), usable_cores()],
    ]


def calls_of(text: str) -> set[str]:
    """Returns what a lowered program calls by name."""
    return {name or other for name, other in re.findall(r'custom_call\s*@(?:"([^"]*)"|([\w.$]+))', text)}


def _settings() -> dict[str, str]:
    """Returns JAX's settings in this thread."""
    names = [name for name in jax.config.values if not NO_PART.search(name)]
    return {name: repr(getattr(jax.config, name, jax.config.values[name])) for name in names}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    known = sorted(environment.items())
    return {name: value for name, value in known if name.startswith(PREFIXES) and not NO_PART.search(name)}


@cache
def _processor() -> tuple[str, ...]:
    """Returns the processor and the instructions that it has."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(2**14).partition("\n\n")[0]
    except OSError:
        return platform.machine(), platform.processor()
    parts = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return platform.machine(), *(line for line in first.splitlines() if line.startswith(parts))
