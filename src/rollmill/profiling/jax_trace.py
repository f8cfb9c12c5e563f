"""Starts and stops the JAX profiler, and keeps its events in memory.

Before version 0.12, the functions of JAX write the events to files in several formats, which takes longer than
reading them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import lib as jax_library

from rollmill.core.temporary import TemporaryFolder

T = TypeVar("T")


class JaxTrace:
    """A running JAX profiler trace of this process. Only one can run at a time."""

    def __init__(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        self._session: Any = _session(options)
        self._folder: TemporaryFolder | None = None
        if self._session is None:
            self._folder = _begin(options)

    def stop(self) -> Any:
        """Ends the trace and returns its `jax.profiler.ProfileData`."""
        if self._folder is not None:
            return _stop_to_file(self._folder, _profile_data)
        session, self._session = self._session, None
        return session.stop_and_get_profile_data()

    def abandon(self) -> None:
        """Ends the trace without collecting its events, which is much faster."""
        if self._folder is not None:
            _stop_to_file(self._folder, _profile_data)
        self._session = None


def trace_of_programs() -> bytes:
    """Returns a serialized `XSpace` without host events, but with this process's compiled programs.

    This uses the profiler, so no trace may be running.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    if (session := _session(options)) is not None:
        return session.stop()
    return _stop_to_file(_begin(options), Path.read_bytes)


def _session(options: jax.profiler.ProfileOptions) -> Any:
    """Starts a session that keeps its events in memory, or None if this version of JAX has none.

    There is no public call that ends a session without its events.
    """
    kind = getattr(getattr(jax_library, "_profiler", None), "ProfilerSession", None)
    if kind is None or not hasattr(kind, "stop_and_get_profile_data"):
        return None
    jax.devices()  # a session only records devices that exist when it begins
    return kind(options)


def _begin(options: jax.profiler.ProfileOptions) -> TemporaryFolder:
    """Starts a trace, and returns the folder it will be written into."""
    folder = TemporaryFolder("trace")
    try:
        jax.profiler.start_trace(folder.path, profiler_options=options)
    except BaseException:
        folder.close()
        raise
    return folder


def _stop_to_file(folder: TemporaryFolder, read: Callable[[Path], T]) -> T:
    try:
        jax.profiler.stop_trace()
        (file,) = folder.path.glob("plugins/profile/*/*.xplane.pb")
        return read(file)
    finally:
        folder.close()


def _profile_data(file: Path) -> Any:
    return jax.profiler.ProfileData.from_file(str(file))
