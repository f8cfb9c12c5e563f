"""Traces functions once and replays the traces, and records whether functions are being traced for checks."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core


class ReplayedTrace:
    """A trace of a function, which can be called like the function itself.

    The function is called once, when the trace is made, with its arguments or their types.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        """Operations of the trace, as a `ClosedJaxpr`."""
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in self.program.out_avals]
        self.result: Any = jax.tree.unflatten(jax.tree.structure(shapes), types)
        """Shapes and dtypes of the result."""

    def __call__(self, *args: Any) -> Any:
        """Computes the result for arguments of the same types."""
        leaves = core.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        arrays = map(_as_array, leaves, self.program.out_avals)
        return jax.tree.unflatten(jax.tree.structure(self.result), list(arrays))


class TracedOnce:
    """A pure function that is traced once for each combination of argument types, and replayed afterwards.

    At the start of a run, checks, the fingerprint and every program need the functions of an environment.
    Replaying a trace is faster than tracing again. Values that are not traced, such as Python numbers in an
    environment's parameters, remain constants. Calls outside of a trace run the function itself, so that errors
    appear in plain Python.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._traces: dict[Hashable, tuple[ReplayedTrace, list[Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        """Returns the result of the function, from a stored trace if there is one for these arguments."""
        leaves, structure = jax.tree.flatten(args)
        traced = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
        if not traced or _setting("jax_disable_jit"):
            return self.function(*args)
        settings = _setting("jax_enable_x64"), _setting("jax_numpy_dtype_promotion")
        kind = structure, settings, tuple(map(_kind, leaves))
        if kind not in self._traces:
            trace = ReplayedTrace(lambda *traced: self.function(*_with(structure, leaves, traced)), *traced)
            if any(isinstance(constant, Tracer) for constant in trace.program.consts):
                # the function closes over a value of this trace, so the result must not be stored
                return trace(*traced)
            # The key contains the addresses of values, so the values must not be freed.
            self._traces[kind] = trace, [leaf for leaf in leaves if not isinstance(leaf, Tracer)]
        return self._traces[kind][0](*traced)


def _as_array(leaf: Any, kind: Any) -> Any:
    """Returns a result as an array. Constants of a replayed program can be Python or NumPy numbers."""
    if isinstance(leaf, jax.Array):
        return leaf
    return jnp.asarray(leaf) if kind.weak_type else jnp.asarray(leaf, kind.dtype)


def _setting(name: str) -> Any:
    """Returns a JAX setting of this thread."""
    return getattr(jax.config, name)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf)
    return (type(leaf), repr(leaf)) if isinstance(leaf, bool | int | float) else id(leaf)


def _with(structure: Any, leaves: list[Any], traced: tuple[Any, ...]) -> Any:
    """Returns the arguments with the traced leaves replaced."""
    others = iter(traced)
    return jax.tree.unflatten(structure, [next(others) if isinstance(leaf, Tracer) else leaf for leaf in leaves])


_CHECKED = ContextVar("parts of graphs are checked", default=True)


def are_checked() -> bool:
    """Returns whether the functions of environments and networks are currently traced for checks."""
    return _CHECKED.get()


@contextmanager
def without_checks() -> Iterator[None]:
    """Context manager in which graphs are built without checks, to compare them with graphs that were checked."""
    token = _CHECKED.set(False)
    try:
        yield
    finally:
        _CHECKED.reset(token)
