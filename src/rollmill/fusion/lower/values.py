"""Arrays of one environment while its jaxpr is lowered: known, uniform, made of nodes, or too large for nodes.

NumPy arrays of nodes do what arrays do to shapes: slicing, reshaping, transposing and concatenating them costs
nothing in the program. Of large arrays, single elements are computed where they are read, or loaded from memory.
Shape letters: `n` columns of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from rollmill.fusion.ir import Node, Program

MAX_SCALARS = 1024
"""Numbers of one array that are held as single nodes."""

MAX_COLUMNS = 64
"""Rows are taken apart into scalars up to this width."""

NARROW = 8
"""Up to this width, what is cut out of rows, and what matrix products give, is scalars."""

MIN_ROW = 33
"""From this length on, vectors of floats that are handed in are rows."""


class LoweringError(Exception):
    """A rule cannot lower a primitive. The text names the obstacle and a remedy."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A typed random key of each environment: two nodes of unsigned integers."""

    first: Node
    second: Node


NodeArray: TypeAlias = Any
"""A NumPy array of nodes, or of `KeyPair`s; NumPy's own types say nothing about objects."""


class Const(NamedTuple):
    """Constants known during tracing."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Data type of the array."""
        return self.array.dtype


class Uniform(NamedTuple):
    """An array that all environments have in common, while a function is lowered; the prologue computes it."""

    array: Array
    places: np.ndarray | None = None
    """Which elements of `array`, by their places in row-major order; all, in its shape, where it is left out."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, or of the chosen elements."""
        return self.array.shape if self.places is None else self.places.shape

    @property
    def dtype(self) -> Any:
        """Data type of the array. Typed keys have no NumPy type."""
        return self.array.dtype


class PrologueOutput(NamedTuple):
    """An output of a function that all environments share, once the function is lowered."""

    number: int
    """Index into `UniformArrays.outputs`."""
    shape: tuple[int, ...]
    dtype: Any


class ScalarArray(NamedTuple):
    """A node for each element, or a `KeyPair` for random keys."""

    nodes: NodeArray
    """In the array's shape."""
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.nodes.shape


class RowArray(NamedTuple):
    """A node for each row along the last axis."""

    nodes: NodeArray
    """In the array's shape without its last axis."""
    width: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (*self.nodes.shape, self.width)


class Concat(NamedTuple):
    """Arrays side by side along their last axis, at least one of them of rows: rows cannot be concatenated."""

    parts: tuple["Value", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def dtype(self) -> Any:
        """Data type of each part."""
        return self.parts[0].dtype


class VectorPair(NamedTuple):
    """Two vectors for an outer product."""

    left: "Value"
    """`[f]`"""
    right: "Value"
    """`[g]`"""


class OuterProducts(NamedTuple):
    """A sum of outer products of vectors, not written out.

    Such is the gradient of a matrix of weights for one sample: one product, or one for each place of an inner axis
    along which a sample uses the matrix, such as its agents. Where only sums over samples are wanted, it never is
    written out.
    """

    pairs: tuple[VectorPair, ...]
    """At least one."""
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """`(f, g)`"""
        return (*self.pairs[0].left.shape, *self.pairs[0].right.shape)

    @property
    def transposed(self) -> "OuterProducts":
        """The same with `f` and `g` exchanged."""
        return OuterProducts(tuple(VectorPair(right, left) for left, right in self.pairs), self.dtype)


Start: TypeAlias = int | Node
"""An index along an axis: known, or a node of int32 that is in bounds."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class ComputedArray:
    """A large array whose elements are computed where they are read."""

    shape: tuple[int, ...]
    dtype: Any
    element: Callable[[Any, Any], Any]
    """`(context, ElementIndex) -> Node` or `KeyPair`."""
    everywhere: Node | None = None
    """The node of all elements, where they are one."""
    read: dict[Any, Any] = field(default_factory=dict)
    """Elements that were read, so that each is computed once."""


class CellWrite(NamedTuple):
    """One element of an array is replaced."""

    place: Start
    """In row-major order."""
    value: Node
    condition: Node | None
    """Whether the element is written. None: it always is."""


class WholeWrite(NamedTuple):
    """All elements of an array are replaced."""

    value: Any
    """A `Value` of the same shape."""
    condition: Node | None


class FillWrite(NamedTuple):
    """All elements of an array are replaced by the results of a program."""

    program: Program
    """From an element's place in row-major order and the captured nodes to the element."""
    captures: tuple[Node, ...]
    condition: Node | None


class MemoryArray(NamedTuple):
    """A large array of the state that lies in memory, and what has been written to it since the step began.

    Nothing is stored before the end of a step, so elements are read as they were, and then replaced by writes to
    the same place, later ones last.
    """

    memory: int
    """Its number among the arrays in memory."""
    shape: tuple[int, ...]
    dtype: Any
    writes: tuple[CellWrite | WholeWrite | FillWrite, ...] = ()


Value: TypeAlias = Const | Uniform | ScalarArray | RowArray | Concat | OuterProducts | ComputedArray | MemoryArray

Output: TypeAlias = Const | PrologueOutput | ScalarArray | RowArray | Concat | OuterProducts | MemoryArray
"""A result of a lowered function. Only sums over samples stay concatenations or products."""


def filled(shape: tuple[int, ...], dtype: Any, make: Callable[[tuple[int, ...]], Any]) -> ScalarArray:
    """Returns an array of nodes, each made from its index. Raises a `LoweringError` for too many nodes."""
    check_size(shape)
    nodes = no_nodes(shape)
    for at in np.ndindex(*shape):
        nodes[at] = make(at)
    return ScalarArray(nodes, dtype)


def no_nodes(shape: int | Sequence[int]) -> NodeArray:
    """Returns an array of nodes with empty entries."""
    return np.empty(shape, object)


def alone(node: Node) -> NodeArray:
    """Returns an array without axes that contains one node."""
    nodes = no_nodes(())
    nodes[()] = node
    return nodes


def check_size(shape: tuple[int, ...], what: str = "an array") -> None:
    """Raises a `LoweringError` for values with too many elements."""
    size = int(np.prod(shape))
    if size > MAX_SCALARS:
        raise LoweringError(
            f"{what} of shape {shape} has {size} numbers per environment, more than the {MAX_SCALARS} that fit "
            "on the chip. Keep less in the state, or make constant arrays a parameter that all environments share"
        )


def is_large(value: Value) -> bool:
    """Returns whether elements of an array are computed, or loaded, where they are read."""
    return isinstance(value, ComputedArray | MemoryArray)


def is_traced(array: Any) -> bool:
    """Returns whether the elements of an array are traced, and so not known yet."""
    return isinstance(array, Tracer)


def is_key(dtype: Any) -> bool:
    """Returns whether elements of this type are random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def shared(array: Any) -> Const | Uniform:
    """Returns a constant array, which all environments share. Random keys are kept as they are, because NumPy has
    no such type.
    """
    if is_traced(array) or (isinstance(array, jax.Array) and is_key(array.dtype)):
        return Uniform(array)
    return Const(np.asarray(array))


def is_shared(value: Value) -> bool:
    """Returns whether all environments share a value."""
    return isinstance(value, Const | Uniform)


def positions(shape: tuple[int, ...]) -> np.ndarray:
    """Returns the row-major index of each element of an array."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def is_output(x: Any) -> bool:
    """Returns whether something in a tree of results is one result of a lowered function."""
    return isinstance(x, Output)


def flat_nodes(value: Value | PrologueOutput) -> list[Node]:
    """Returns the nodes of a value in row-major order, both of each key, and those of all its parts."""
    match value:
        case Const() | Uniform() | PrologueOutput():
            return []
        case Concat(parts):
            return [node for part in parts for node in flat_nodes(part)]
        case OuterProducts(pairs):
            return [node for pair in pairs for side in pair for node in flat_nodes(side)]
        case MemoryArray(writes=writes):
            return [node for write in writes for node in nodes_of_write(write)]
        case ComputedArray():
            return []
    nodes: list[Node] = []
    for node in value.nodes.flat:
        nodes.extend((node.first, node.second) if isinstance(node, KeyPair) else (node,))
    return nodes


def nodes_of_write(write: CellWrite | WholeWrite | FillWrite) -> list[Node]:
    """Returns the nodes that a write is made of, the condition last."""
    condition = [] if write.condition is None else [write.condition]
    match write:
        case CellWrite(place, value):
            return [*([] if isinstance(place, int) else [place]), value, *condition]
        case FillWrite(_, captures):
            return [*captures, *condition]
    return condition


def is_same(one: Value, other: Value, same_node: Callable[[Node, Node], bool]) -> bool:
    """Returns whether two values are surely equal."""
    match one, other:
        case Const(a), Const(b):
            return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        case Uniform(a, here), Uniform(b, there):
            places = here is there or (here is not None and there is not None and np.array_equal(here, there))
            return a is b and places
        case (ScalarArray(), ScalarArray()) | (RowArray(), RowArray()):
            pairs = zip(flat_nodes(one), flat_nodes(other), strict=True)
            return one.shape == other.shape and all(same_node(*pair) for pair in pairs)
        case Concat(a), Concat(b):
            return len(a) == len(b) and all(is_same(*pair, same_node) for pair in zip(a, b, strict=True))
        case OuterProducts(a), OuterProducts(b):
            sides = zip([x for pair in a for x in pair], [x for pair in b for x in pair], strict=False)
            return len(a) == len(b) and all(is_same(*pair, same_node) for pair in sides)
        case MemoryArray(), MemoryArray():
            writes = zip(one.writes, other.writes, strict=False)
            is_one = one.memory == other.memory and len(one.writes) == len(other.writes)
            return is_one and all(a is b for a, b in writes)
    return one is other
