"""Names operations, the parts of a run that the profiler distinguishes.

In traced code, an operation is a scope, which the compiler stores with each instruction. On the host, it is a span
of time. Without a profiler, a span costs only a comparison.
"""

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import jax

from rollmill.core.errors import UsageError

SCOPE_MARK = "operation:"
"""Prefix of the scopes that mark operations in traced code. No function or library uses it."""
SPAN_MARK = "rollmill"
"""Prefix of host span names in a trace: `rollmill:CATEGORY:NAME`."""

ROLLOUT_KERNEL, GRADIENTS_KERNEL = "rollmill_rollout", "rollmill_gradients"
"""Names of Rollmill's own kernels in GPU traces."""

INNER = "operation"
"""Category of the spans of `operation`, which are parts of the spans around them."""

STEPPING = "collect/environment"
"""Name of the operation in which host environments are created and stepped."""
AROUND_SIMULATORS = "python" if sys.version_info >= (3, 12) else "simulator"
"""Category of the time in which host environments are stepped, except for calls of simulators. From Python 3.12
on, `rollmill.profiling.simulator_calls` distinguishes such calls."""

_NOTHING = nullcontext()
_STEPPED: dict[int, str] = {}
"""Maps threads that step host environments to their current operation."""


class _Recording:
    on = False


def set_recording(on: bool) -> None:
    """Starts or stops the recording of host spans, for the profiler."""
    _Recording.on = on


def operation_scope(name: str) -> AbstractContextManager[object]:
    """Returns the scope of an operation, to be entered in traced code."""
    return jax.named_scope(SCOPE_MARK + name)


def span(name: str, category: str = "python") -> AbstractContextManager[object]:
    """Context manager that records its time on the host, under the name of an operation or activity.

    The category is one of `rollmill.profiling.results.CATEGORIES`, or `INNER`.
    """
    return jax.profiler.TraceAnnotation(f"{SPAN_MARK}:{category}:{name}") if _Recording.on else _NOTHING


def stepped_operation() -> str | None:
    """Returns the operation for which this thread currently steps host environments, while spans are recorded."""
    return _STEPPED.get(threading.get_ident())


class ThreadActivity:
    """Records what a host thread is doing, from one change to the next. All calls must come from that thread."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[object] | None = None

    def become(self, name: str, category: str = "python", *, stepping: bool = False) -> None:
        """Ends the thread's current activity and begins the next. `category` is the same as in `span`.

        `stepping` marks an operation that steps host environments.
        """
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            _STEPPED.pop(threading.get_ident(), None)
        if _Recording.on:
            self._open = span(name, category)
            self._open.__enter__()
            if stepping:
                _STEPPED[threading.get_ident()] = name


class operation:
    """Names a part of a run for `rollmill profile`.

    In traced functions, such as an environment's step, it names the resulting instructions. In code
    that the host runs, such as an environment in Python, it names the time. Operations may be nested:

        with rollmill.operation("collisions"):
            ...

    Args:
        name: a short name, which must not be empty or contain `/`, `:`, `"`, `(` or `)`.

    Raises:
        UsageError: the name is not a string, is empty, or contains one of these characters.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or set(name) & set('/:"()'):
            raise UsageError(f'operation({name!r}): the name must be a nonempty string without / : " ( and ).')
        self._name = name

    def __enter__(self) -> None:
        self._parts = (operation_scope(self._name), span(self._name, INNER))
        for part in self._parts:
            part.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in reversed(self._parts):
            part.__exit__(kind, error, trace)
