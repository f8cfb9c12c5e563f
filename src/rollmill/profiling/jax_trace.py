"""Starts and stops JAX's profiler, whose events stay in memory.

JAX's own way writes them to files, as JSON too, which takes longer than to read them.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax._src import profiler as jax_profiler


class JaxTrace:
    """A trace of this process that is going on; only one at a time, because JAX's profiler is one."""

    def __init__(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        self._folder = Path(tempfile.mkdtemp(prefix="rollmill-trace-"))
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def stop(self) -> Any:
        """Ends it; returns the `jax.profiler.ProfileData`."""
        try:
            data = _stop_in_memory()
            return self._stop_to_file() if data is None else data
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_to_file(self) -> Any:
        jax.profiler.stop_trace()
        (file,) = self._folder.glob("plugins/profile/*/*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def _stop_in_memory() -> Any:
    """None if this version of JAX keeps its session elsewhere: there is no public call for it."""
    state: Any = getattr(jax_profiler, "_profile_state", None)
    stop = getattr(getattr(state, "profile_session", None), "stop_and_get_profile_data", None)
    if stop is None:
        return None
    with state.lock:
        data = stop()
        state.reset()
    return data
