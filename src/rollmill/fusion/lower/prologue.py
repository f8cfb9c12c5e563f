"""The prologue of a program: computes the arrays that the program reads, once before its kernel starts.

While a function is lowered, its uniform arguments are abstract. Computation that depends only on them is traced
into the prologue, so the program itself holds no tracers. The prologue is evaluated wherever the kernel is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, PyTree

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.values import Uniform


class UniformArrays(NamedTuple):
    """The arrays that a prologue computes for all environments, or their shapes."""

    slots: list[Any]
    """Arrays that nodes read, by slot."""
    outputs: list[Any]
    """Results of the function that all environments share. Each `PrologueOutput` refers to one of them."""


@dataclass(frozen=True, eq=False, repr=False)
class Prologue:
    """The part of a lowered function that depends only on uniform arguments, which environments share."""

    jaxpr: core.ClosedJaxpr
    """Computes the arrays of all slots, then the outputs, from the leaves of the uniform arguments."""
    num_slots: int

    def __repr__(self) -> str:
        return f"Prologue of {self.num_slots} slots"

    def __call__(self, *uniform: PyTree[Array]) -> UniformArrays:
        """Evaluates the prologue, on arrays or within a trace.

        A slot that is an argument itself is the same object: backends recognise weights by that.
        """
        results = core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(uniform))
        return self._parts([x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results])

    @property
    def shapes(self) -> UniformArrays:
        """Shapes of the arrays that the prologue computes."""
        avals: Sequence[Any] = self.jaxpr.out_avals
        return self._parts([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])

    def _parts(self, results: list[Any]) -> UniformArrays:
        return UniformArrays(results[: self.num_slots], results[self.num_slots :])


def trace_prologue(make: Callable[[list[Array]], UniformArrays], uniform: Sequence[Any]) -> Prologue:
    """Traces `make` into a prologue, for uniform arguments of these shapes."""
    num_slots: list[int] = []

    def trace(*leaves: Array) -> list[Array]:
        arrays = make(list(leaves))
        num_slots.append(len(arrays.slots))
        return [*arrays.slots, *arrays.outputs]

    closed = jax.make_jaxpr(trace)(*uniform)
    return Prologue(_without_dead_code(closed), num_slots[0])


def _without_dead_code(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the same results, without equations and constants that none of them needs."""
    jaxpr = closed.jaxpr
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    live = []
    for equation in reversed(jaxpr.eqns):
        # Backwards, so that all readers of an equation's results have been seen before the equation.
        if equation.effects or not read.isdisjoint(equation.outvars):
            read.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
            live.append(equation)
    pairs = [pair for pair in zip(jaxpr.constvars, closed.consts, strict=True) if pair[0] in read]
    pruned = jaxpr.replace(eqns=live[::-1], constvars=[var for var, _ in pairs])
    return core.ClosedJaxpr(pruned, [const for _, const in pairs])


class PrologueBuilder:
    """Collects the arrays of a prologue while a function is lowered, and assigns their slots."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._slots: dict[Any, int] = {}
        self._held: dict[int, Any] = {}
        self._computed: dict[Any, Any] = {}

    def slot(self, array: Array | np.ndarray) -> int:
        """Adds an array to those that the prologue computes, unless it is already one of them, and returns its
        slot.
        """
        key = self._identity(array)
        if key not in self._slots:
            self._slots[key] = len(self.arrays)
            self.arrays.append(jnp.asarray(array))
        return self._slots[key]

    def _identity(self, array: Array | np.ndarray) -> Any:
        """Returns a key for an array: by value for constants, by identity otherwise."""
        if isinstance(array, np.ndarray):
            return array.shape, array.dtype.name, array.tobytes()
        self._held[id(array)] = array  # keeps the array alive, so that its id is not reused
        return id(array)

    def picked(self, value: Uniform) -> Array:
        """Returns the array of a uniform value.

        If the value selects elements of another array, the selection is computed once and then reused.
        """
        places = value.places
        if places is None:
            return value.array
        key = ("picked", places.shape, places.tobytes())
        # Keyed by indices, so that two rules that select the same part of an array get one slot.
        return self._once(value.array, key, lambda: _pick(value.array, places))

    def turned(self, matrix: Array | np.ndarray) -> Array | np.ndarray:
        """Returns the transpose of a matrix, computed only once."""
        return self._once(matrix, ("turned",), lambda: matrix.T)

    def combined(self, rows: Array | np.ndarray, weights: np.ndarray, dtype: Any) -> Array:
        """Returns a weighted sum of a matrix's rows, computed only once."""
        total = lambda: jnp.sum(jnp.asarray(rows) * weights[:, None], axis=0).astype(dtype)
        return self._once(rows, ("combined", weights.tobytes(), dtype), total)

    def added(self, one: Node, other: Node) -> Array:
        """Returns the sum of two uniform rows, computed only once."""
        # Nodes are unique in their region, so `one` and `other` identify the rows.
        whole = self.arrays[one.attributes[0]]
        return self._once(whole, ("added", one, other), lambda: self._row(one) + self._row(other))

    def _row(self, node: Node) -> Array:
        slot, place = node.attributes
        return self.arrays[slot].reshape(-1)[place : place + (node.width or 1)]

    def _once(self, array: Any, how: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of `make` for an array, computed once."""
        key = (self._identity(array), how)
        if key not in self._computed:
            self._computed[key] = make()
        return self._computed[key]


def _pick(array: Array, places: np.ndarray) -> Array:
    flat, wanted = array.reshape(-1), places.reshape(-1)
    # Adjacent elements are a slice, which XLA need not copy if it can return a part of the buffer.
    if wanted.size and np.array_equal(wanted, wanted[0] + np.arange(wanted.size)):
        return jax.lax.slice(flat, (int(wanted[0]),), (int(wanted[-1]) + 1,)).reshape(places.shape)
    return flat[jnp.asarray(places, jnp.int32)]
