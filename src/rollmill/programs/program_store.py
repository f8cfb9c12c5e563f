"""Stores compiled programs on disk, and loads them without tracing or lowering them again.

JAX can look up a program in its cache only after tracing and lowering it, which takes longer than loading. Here,
the key of a program is a digest of its operations, the version and settings of JAX, and the device. A program that
depends on anything else is not stored, such as one that calls a function of the host, or code that the process
registers. GPU kernels are part of the program that calls them.
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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jaxlib import xla_client

from rollmill.core.installation import cache_root, read_verified, write_verified
from rollmill.core.machine import identify_processor, installed_version, usable_cores
from rollmill.lowerings.threefry import THREEFRY_CALL, small_programs
from rollmill.programs.cache import WITH_NAMES, kept_out_of_cache
from rollmill.programs.compiler_options import CompilerOptions
from rollmill.programs.threefry_code import register_threefry

FOLDER = "programs"
MAX_BYTES = 2**28
"""Maximum compressed size of a stored program, in bytes."""

PLATFORMS = ("cpu", "gpu")
"""Platforms on which stored programs have been compared with newly compiled ones."""

KERNEL_PLATFORMS = ("gpu",)
"""Platforms on which compiled programs contain their kernels. On CPUs, they call code of the process."""

REPLAY_KERNEL_PLATFORMS: tuple[str, ...] = ()
"""Platforms on which stored programs with both kernels and a replay memory have been compared with newly compiled
ones.
"""

MIN_COMPILE_SECONDS = 0.3
"""Programs that compile faster than this are not stored, as in the JAX cache."""

MAX_RECENT = 8
"""Number of stored programs that a process keeps in memory. Their code takes a few megabytes each."""

KERNEL_CALL = "triton_kernel_call_ffi"
"""Name of the foreign call that launches a GPU kernel. The program itself contains the kernel."""

OWN_CALLS = {
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint", "cu_threefry2x32_ffi"),
    *(KERNEL_CALL, THREEFRY_CALL),
}
"""Names of foreign calls that a stored program may contain.

They are registered before the program is loaded, or XLA replaces them while it compiles.
"""

CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""Event with which JAX reports that a program was loaded from its cache."""

NO_PART = re.compile("cache|log|dump|trace|state_dir", re.IGNORECASE)
"""Pattern of JAX settings that do not affect programs."""

PREFIXES = ("JAX_", "XLA_", "TF_", "NVIDIA_", "CUBLAS_", "CUDNN_", "EQX_", "ROLLMILL_")
"""Prefixes of environment variables that may affect programs."""

GPU_SELECTION_PREFIXES = ("NVIDIA_VISIBLE_", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_", "XLA_PYTHON_CLIENT_")
"""Prefixes of environment variables that only set which GPUs, and how much of their memory, a process may use."""

GPU_PACKAGES = (
    *("triton", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cublas", "nvidia-cudnn-cu13"),
)
"""Packages that compile programs for GPUs, and the libraries that these programs call."""


@dataclass
class RecentPrograms:
    """Programs that this process has compiled or loaded, for later runs of the same program.

    Loading a small program takes half a second of processor time. On GPUs, programs are not kept, because they
    hold memory of the device.
    """

    programs: OrderedDict[Path, tuple[object, jax.stages.Compiled]] = field(default_factory=OrderedDict)
    """Programs by their file, with the state of the file. The one used last comes last."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, file: Path, make: "StorableProgram") -> jax.stages.Compiled | None:
        """Returns the program of an unchanged file, or None if it is not kept or has other types of arguments."""
        with self.lock:
            state, program = self.programs.get(file, (None, None))
            if program is None or state != _state(file):
                return None
            self.programs.move_to_end(file)
        try:
            return program if (program.in_tree, program.out_tree) == make.structures() else None
        except ValueError:  # arrays in a structure have no single truth value
            return None

    def keep(self, file: Path, program: jax.stages.Compiled) -> None:
        """Keeps the program of a file, instead of the one that was not used for the longest time."""
        with self.lock:
            self.programs[file] = (_state(file), program)
            self.programs.move_to_end(file)
            while len(self.programs) > MAX_RECENT:
                self.programs.popitem(last=False)


RECENT = RecentPrograms()


class ProgramStore:
    """The entry of the program store for one program.

    Args:
        name: digest of everything that the program depends on. None if the program is not stored.
        device: the device that the program runs on.
    """

    def __init__(self, name: str | None, device: Any = None) -> None:
        self.name, self.device = name, device
        self.refusal: str | None = None
        """Why a program that was compiled is not stored, though it has a place."""

    def has(self, make: "StorableProgram") -> bool:
        """Returns whether the program is stored."""
        file = self._file(make)
        return file is not None and _is_there(file)

    def load(self, make: "StorableProgram") -> jax.stages.Compiled | None:
        """Returns the stored program, or None if it is not stored or cannot be loaded on this device."""
        file = self._file(make)
        if file is None or not _is_there(file):
            return None
        if (recent := RECENT.find(file, make)) is not None:
            return recent
        if (loaded := self._load(file, make)) is not None:
            self._keep(file, loaded)
        return loaded

    def compile(self, make: "StorableProgram", lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a lowered program and stores it. May be called in any thread."""
        return self._compile_and_store(self._file(make), make, lowered)

    def _load(self, file: Path, make: "StorableProgram") -> jax.stages.Compiled | None:
        try:
            packed = read_verified(file, MAX_BYTES)
            if packed is None:
                return None
            _register_calls(self.device)
            here = {"backend": self.device.client, "execution_devices": [self.device]}
            return deserialize_and_load(zlib.decompress(packed), *make.structures(), **here)
        except Exception:  # a program of another version may raise anything, and is compiled again
            return None

    def _compile_and_store(
        self, file: Path | None, make: "StorableProgram", lowered: jax.stages.Lowered
    ) -> jax.stages.Compiled:
        """Compiles a program, and stores it unless it depends on more than the store's name, or compiles fast."""
        others = set() if file is None else unknown_calls(lowered)
        began = time.perf_counter()
        with _cache_hits() as hits, kept_out_of_cache() if file and not others else contextlib.nullcontext():
            compiled = lowered.compile(dict(make.options))
        is_short = time.perf_counter() - began < MIN_COMPILE_SECONDS
        if file is None or hits or is_short:
            return compiled
        if others:
            self.refusal = f"it calls {', '.join(sorted(others))}"
            return compiled
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            write_verified(file, zlib.compress(serialize(compiled)[0], level=1))
            self._keep(file, compiled)
        return compiled

    def _keep(self, file: Path, program: jax.stages.Compiled) -> None:
        if self.device.platform == "cpu":
            RECENT.keep(file, program)

    def _file(self, make: "StorableProgram") -> Path | None:
        if self.name is None:
            return None
        how = json.dumps([sorted(make.options.items()), sorted(make.settings)])
        how = hashlib.sha256(how.encode()).hexdigest()[:16]
        return cache_root() / FOLDER / f"{make.part}-{self.name}-{how}"


class StorableProgram(NamedTuple):
    """A program that can be loaded from a store, or traced, lowered and compiled."""

    part: str
    """What the program is for: the part of a run that it computes."""
    function: Callable[..., Any]
    arguments: Sequence[Any]
    """Types of the program's arguments."""
    result: Callable[[], Any]
    """Returns the program's result or its types, from which a stored program takes the structure of its result."""
    options: CompilerOptions
    """Options of the compiler."""
    settings: Mapping[str, Any] = {}
    """Arguments of `jax.jit`."""
    runs_once: bool = False
    """True if the program runs only once, so that fast compilation matters more than a fast program."""

    def structures(self) -> tuple[Any, Any]:
        """Returns the structures of the program's arguments and of its result."""
        return jax.tree.structure((tuple(self.arguments), {})), jax.tree.structure(self.result())

    def lower(self, name: str | None) -> jax.stages.Lowered:
        """Traces and lowers the program.

        The lowered program is named after its place in the store, so that the JAX cache does not return it under
        another name. A program from the JAX cache could not be stored, because XLA serialises only a part of a
        loaded program.
        """

        def program(*args: Any) -> Any:
            return self.function(*args)

        program.__name__ = self.part if name is None else f"{self.part}_{name}"
        with small_programs(jax.default_backend()) if self.runs_once else contextlib.nullcontext():
            return jax.jit(program, **self.settings).trace(*self.arguments).lower()


def _register_calls(device: Any) -> None:
    """Registers the functions that stored programs call on a device, as lowering or compiling them does."""
    if device.platform == "gpu":
        from jaxlib import gpu_triton

        assert gpu_triton is not None
    else:
        register_threefry()


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Records programs that this thread takes from the JAX cache."""
    thread, hits = threading.get_ident(), []

    def hear(event: str, **_: str | int) -> None:
        if event == CACHE_HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(hear)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(hear)


def _state(file: Path) -> object:
    """Returns a value that changes with the content of a file, or None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_there(file: Path) -> bool:
    """Returns whether there is a file. Nobody can tell in a folder of another user."""
    try:
        return file.exists()
    except OSError:
        return False


NO_STORE = ProgramStore(None)
"""Store for programs that are not stored, because a digest cannot cover everything that they depend on."""


def store_for(device: Any, digest: str | None, known: Sequence[object], sources: Iterable[Path]) -> ProgramStore:
    """Returns the entry of the program store for one program.

    Args:
        device: the only device that runs the program.
        digest: digest of the program's operations, or None if the program depends on more than its operations.
        known: everything else that the program depends on, as JSON values.
        sources: Python files that turn the operations into a program.
    """
    settings = jax.config.values
    is_on = settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]
    if digest is None or not is_on or settings[WITH_NAMES] or device.platform not in PLATFORMS:
        return NO_STORE
    around = [surroundings(device), [_source_digest(source, source.stat().st_mtime_ns) for source in sources]]
    text = json.dumps([digest, *known, around])
    return ProgramStore(hashlib.sha256(text.encode()).hexdigest()[:32], device)


@cache
def _source_digest(source: Path, changed: int) -> str:
    """Returns the digest of a file, which is read again only if its modification time has changed."""
    del changed
    return hashlib.sha256(source.read_bytes()).hexdigest()


def surroundings(device: Any) -> list[object]:
    """Returns what all programs on a device depend on: versions, settings, environment variables, and the chip."""
    client = device.client
    return [
        *map(installed_version, ("jax", "jaxlib", "llvmlite")),
        platform.python_version(),
        [client.platform, client.platform_version, device.device_kind],
        _settings(),
        [_flags(), _variables(os.environ)],
        _gpu(device) if device.platform == "gpu" else [*identify_processor(), os.cpu_count(), usable_cores()],
    ]


def unknown_calls(lowered: jax.stages.Lowered) -> set[str]:
    """Returns the names of the foreign functions that prevent a lowered program from being stored."""
    return calls_of(lowered.as_text()) - OWN_CALLS


def calls_of(text: str) -> set[str]:
    """Returns the names of the foreign functions that a lowered program calls, given its source."""
    return {name or other for name, other in re.findall(r'custom_call\s*@(?:"([^"]*)"|([\w.$]+))', text)}


def _settings() -> dict[str, str]:
    """Returns the JAX settings of this thread."""
    names = [name for name in jax.config.values if not NO_PART.search(name)]
    return {name: repr(getattr(jax.config, name, jax.config.values[name])) for name in names}


def _flags() -> str:
    """Returns a digest of the flags that XLA has read, which it does once: `XLA_FLAGS` may have changed since."""
    options = xla_client.CompileOptions()
    # Accessing the options makes XLA fill in the flags.
    assert options.executable_build_options.debug_options is not None
    return hashlib.sha256(options.SerializeAsString()).hexdigest()


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    matters = lambda name: (
        name.startswith(PREFIXES) and not name.startswith(GPU_SELECTION_PREFIXES) and name != "XLA_FLAGS"
    )
    known = sorted(environment.items())
    return {name: value for name, value in known if matters(name) and not NO_PART.search(name)}


def _gpu(device: Any) -> list[object]:
    """Returns the chip of a GPU, its driver, and the versions of the packages that compile for it."""
    chip = [device.compute_capability, getattr(device, "core_count", None)]
    return [chip, _driver(), [installed_version(name) for name in GPU_PACKAGES]]


@cache
def _driver() -> str:
    """Returns the version of the NVIDIA driver, if known."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
