"""Maps the leaves of pytrees to inputs and outputs of programs.

A leaf in memory is `[E, *shape]`. A program has one node for each of its elements or rows, in row-major order.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.core.types import is_key
from rollmill.fusion.ir import Program
from rollmill.fusion.lower.complex_numbers import is_complex
from rollmill.fusion.lower.function import LoweredFunction
from rollmill.fusion.lower.prologue import UniformArrays
from rollmill.fusion.lower.values import (
    CellWrite,
    Const,
    FillWrite,
    MemoryArray,
    Output,
    PrologueOutput,
    RowArray,
    ScalarArray,
    is_output,
    nodes_of_write,
)


class CellStore(NamedTuple):
    """A write to one element of a large array. The fields are positions among a program's outputs."""

    place: int
    value: int
    condition: int | None


class Fill(NamedTuple):
    """A write to all elements of a large array, computed element by element."""

    program: Program
    """Computes an element from its row-major index and the captured values."""
    captures: tuple[int, ...]
    condition: int | None


LeafWrite: TypeAlias = CellStore | Fill


class Leaf(NamedTuple):
    """A pytree leaf, one array per environment, as inputs or outputs of a program."""

    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[int, ...]
    """Positions of its elements or rows among the program's inputs or outputs."""
    width: int | None
    """Number of columns of its rows, or None if it is held element by element."""
    same: np.ndarray | PrologueOutput | None = None
    """Its value if all environments share it, so that no program computes it."""
    memory: int | None = None
    """Its number among the large arrays in memory, or None. A program loads elements of such arrays."""
    writes: tuple["LeafWrite", ...] = ()
    """Writes to its memory at the end of a step, in order."""

    def split(self, array: Array) -> list[Array]:
        """Splits an array `[E, *shape]` into the inputs of a program."""
        # In row-major order, elements or rows of a leaf are consecutive inputs.
        if self.memory is not None:
            return []
        tail = () if self.width is None else (self.width,)
        flat = array.reshape(array.shape[0], len(self.places), *tail)
        return [flat[:, n] for n in range(len(self.places))]

    def join(self, outputs: Sequence[Array], uniforms: UniformArrays, num_envs: int) -> Array:
        """Joins outputs of a program to an array `[E, *shape]`."""
        if not self.places:
            return self.repeated(uniforms, num_envs)
        numbers = jnp.stack([outputs[place] for place in self.places], axis=1)
        return numbers.reshape(num_envs, *self.shape)

    def repeated(self, uniforms: UniformArrays, *axes: int) -> Array:
        """Broadcasts the value of a leaf that all environments share to an array `[*axes, *shape]`."""
        shared = uniforms.outputs[self.same.number] if isinstance(self.same, PrologueOutput) else self.same
        return jnp.broadcast_to(jnp.asarray(shared, self.dtype), (*axes, *self.shape))


def input_leaves(lowered: LoweredFunction, structs: PyTree[jax.ShapeDtypeStruct]) -> list[Leaf]:
    """Returns a `Leaf` for each array of `structs`, the first arguments of a lowered function."""
    leaves, first = [], 0
    kinds = jax.tree.leaves(lowered.inputs, is_leaf=is_output)
    for struct, kind in zip(jax.tree.leaves(structs), kinds, strict=False):
        if isinstance(kind, MemoryArray):
            leaves.append(Leaf(struct.shape, np.dtype(struct.dtype), (), None, memory=kind.memory))
            continue
        size = math.prod(struct.shape)
        width = lowered.program.inputs[first].width if size else None
        count = size // (width or 1)
        leaves.append(Leaf(struct.shape, np.dtype(struct.dtype), tuple(range(first, first + count)), width))
        first += count
    return leaves


def output_leaves(lowered: LoweredFunction) -> list[list[Leaf]]:
    """Returns the leaves of each output of a lowered function."""
    first, parts = 0, []
    for part in lowered.outputs:
        parts.append(leaves_of_outputs(part, first))
        first += sum(map(_num_outputs, parts[-1]))
    return parts


def leaves_of_outputs(part: PyTree[Output], first: int = 0) -> list[Leaf]:
    """Returns the leaves of a pytree of results, whose nodes begin at output number `first` of a program."""
    leaves = []
    for value in jax.tree.leaves(part, is_leaf=is_output):
        leaves.append(output_leaf(value, first))
        first += _num_outputs(leaves[-1])
    return leaves


def _num_outputs(leaf: Leaf) -> int:
    """Returns how many outputs of a program a leaf is made of."""
    return len(leaf.places) + sum(map(_num_nodes, leaf.writes))


def _num_nodes(write: LeafWrite) -> int:
    count = 2 if isinstance(write, CellStore) else len(write.captures)
    return count + (write.condition is not None)


def output_leaf(value: Output, first: int) -> Leaf:
    """Returns the leaf of one result, whose nodes begin at output number `first` of a program."""
    if isinstance(value, Const | PrologueOutput):
        return Leaf(value.shape, value.dtype, (), None, value.array if isinstance(value, Const) else value)
    if isinstance(value, MemoryArray):
        return Leaf(value.shape, value.dtype, (), None, memory=value.memory, writes=_writes(value, first))
    assert isinstance(value, RowArray | ScalarArray), value
    width = value.width if isinstance(value, RowArray) else None
    return Leaf(value.shape, value.dtype, tuple(range(first, first + value.nodes.size)), width)


def _writes(value: MemoryArray, first: int) -> tuple[LeafWrite, ...]:
    """Returns the writes to a large array, with nodes given by their indices among a program's outputs."""
    writes: list[LeafWrite] = []
    for write in value.writes:
        count = len(nodes_of_write(write))
        condition = None if write.condition is None else first + count - 1
        if isinstance(write, CellWrite):
            writes.append(CellStore(first, first + 1, condition))
        else:
            assert isinstance(write, FillWrite), write
            captures = range(first, first + len(write.captures))
            writes.append(Fill(write.program, tuple(captures), condition))
        first += count
    return tuple(writes)


# --- typed keys are their data in a program, and complex numbers two floats --------------------------------


def to_raw(tree: PyTree) -> list[Any]:
    """Returns the leaves of a pytree of arrays or shapes. Random keys become their data, and complex arrays become
    pairs of floats.
    """
    return [_raw(leaf) for leaf in jax.tree.leaves(tree)]


def from_raw(like: PyTree, leaves: Sequence[Array]) -> PyTree:
    """Rebuilds a pytree with the structure and types of `like` from the leaves that `to_raw` returns."""
    known, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(_whole, known, leaves))


def each_struct(tree: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes for ONE environment, by dropping the first axis of every leaf."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _raw(leaf: Any) -> Any:
    if not is_key(leaf.dtype) and not is_complex(leaf.dtype):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*leaf.shape, 2), jnp.uint32 if is_key(leaf.dtype) else jnp.float32)
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else jnp.stack([leaf.real, leaf.imag], axis=-1)


def _whole(like: Any, raw: Any) -> Any:
    if is_key(like.dtype):
        return jax.random.wrap_key_data(raw)
    return jax.lax.complex(raw[..., 0], raw[..., 1]) if is_complex(like.dtype) else raw


class KernelArguments:
    """Collects the arrays that a kernel takes, each of them once."""

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def index_of(self, array: Any) -> int:
        """Adds an array unless it is already an argument, and returns its position."""
        # Compares identities, because tracers cannot be compared. Each array becomes one pointer of the kernel.
        for number, known in enumerate(self.arrays):
            if known is array:
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1
