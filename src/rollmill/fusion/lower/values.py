"""The values that lowering works on: arrays of one environment that are constant, uniform, made of nodes, or
large.

An array of nodes is a NumPy array, so slicing, reshaping, transposing and concatenating it costs nothing in the
program. Elements of large arrays are computed or loaded only when they are read. Shape letters: `n` columns of
rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from rollmill.core.types import is_key
from rollmill.fusion.ir import Node, Program

MAX_SCALARS = 1024
"""Maximum number of elements of an array that are held as one node each."""

MAX_COLUMNS = 64
"""Maximum width of rows that may be split into scalars."""

NARROW = 8
"""Maximum width of slices of rows, and of results of matrix products, that become scalars."""

MIN_ROW = 33
"""Minimum length of float vectors among the arguments that are held as rows."""


class LoweringError(Exception):
    """Raised if a rule cannot lower a primitive. The message names the obstacle and a remedy."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A random key of each environment, as two nodes of unsigned integers."""

    first: Node
    second: Node


NodeArray: TypeAlias = Any
"""A NumPy array of nodes or `KeyPair`s, which type annotations of NumPy cannot express."""


class Const(NamedTuple):
    """An array of constants, known while a function is lowered."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.array.dtype


class Uniform(NamedTuple):
    """An array that all environments share, and that the prologue computes."""

    array: Array
    places: np.ndarray | None = None
    """Row-major indices of the elements of `array` that form this value, in its shape. None for the whole
    array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.array.shape if self.places is None else self.places.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the array, which is not a NumPy dtype for random keys."""
        return self.array.dtype


class PrologueOutput(NamedTuple):
    """A result of a lowered function that all environments share, and that the prologue computes."""

    number: int
    """Index into `UniformArrays.outputs`."""
    shape: tuple[int, ...]
    dtype: Any


class ScalarArray(NamedTuple):
    """An array with one scalar node per element, or with one `KeyPair` per random key."""

    nodes: NodeArray
    """Nodes in the shape of the array."""
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.nodes.shape


class RowArray(NamedTuple):
    """An array with one row node for each vector along its last axis."""

    nodes: NodeArray
    """Nodes in the shape of the array without its last axis."""
    width: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (*self.nodes.shape, self.width)


class Concat(NamedTuple):
    """Arrays concatenated along their last axis, at least one of which has rows."""

    parts: tuple["Value", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def dtype(self) -> Any:
        """Dtype of all parts."""
        return self.parts[0].dtype


class VectorPair(NamedTuple):
    """The two vectors of an outer product."""

    left: "Value"
    """Left vector, `[f]`."""
    right: "Value"
    """Right vector, `[g]`."""


class OuterProducts(NamedTuple):
    """A sum of outer products of vectors that is not expanded.

    The gradient of a weight matrix for one sample has this form. It has one product, or several if the sample uses
    the matrix several times, for example once for each agent. If only sums over samples are needed, the products
    are never expanded.
    """

    pairs: tuple["VectorPair", ...]  # quoted for jaxtyping, which cannot resolve "Value"
    """Vectors of the products, at least one pair."""
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum, `(f, g)`."""
        return (*self.pairs[0].left.shape, *self.pairs[0].right.shape)

    @property
    def transposed(self) -> "OuterProducts":
        """The transposed sum, with left and right vectors exchanged."""
        return OuterProducts(tuple(VectorPair(right, left) for left, right in self.pairs), self.dtype)


Start: TypeAlias = int | Node
"""An index along an axis: a known integer, or an int32 node that is in bounds."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class ComputedArray:
    """A large array whose elements are computed only when they are read."""

    shape: tuple[int, ...]
    dtype: Any
    element: Callable[[Any, Any], Any]
    """Returns the node or `KeyPair` of an element: `(context, ElementIndex) -> Node`."""
    everywhere: Node | None = None
    """The node that equals all elements, or None if they differ."""
    read: dict[Any, Any] = field(default_factory=dict)
    """Cache of the elements read so far, so that each is computed only once."""


class CellWrite(NamedTuple):
    """A pending write to one element of an array in memory. It is stored at the end of the step."""

    place: Start
    """Row-major index of the element."""
    value: Node
    condition: Node | None
    """Whether the element is written. None if it always is."""


class WholeWrite(NamedTuple):
    """A write that replaces all elements of a large array by the elements of another value."""

    value: Any
    """The new elements, as a `Value` of the same shape."""
    condition: Node | None


class FillWrite(NamedTuple):
    """A write that replaces all elements of a large array by the results of a program."""

    program: Program
    """Computes an element from its row-major index and the captured nodes."""
    captures: tuple[Node, ...]
    condition: Node | None


class MemoryArray(NamedTuple):
    """A large array of the environment state that stays in memory, with the writes since the step began.

    Nothing is stored before the end of a step. A read loads the element as it was before the step, and then
    applies the writes to the same index, in order.
    """

    memory: int
    """Its number among the large arrays in memory."""
    shape: tuple[int, ...]
    dtype: Any
    writes: tuple[CellWrite | WholeWrite | FillWrite, ...] = ()


Value: TypeAlias = Const | Uniform | ScalarArray | RowArray | Concat | OuterProducts | ComputedArray | MemoryArray

Output: TypeAlias = Const | PrologueOutput | ScalarArray | RowArray | Concat | OuterProducts | MemoryArray
"""A result of a lowered function. Concatenations and outer products remain only if sums over samples are
needed."""


def fill_nodes(shape: tuple[int, ...], dtype: Any, make: Callable[[tuple[int, ...]], Any]) -> ScalarArray:
    """Returns an array of nodes from calls of `make` with each index. Raises a `LoweringError` if too many."""
    check_size(shape)
    nodes = no_nodes(shape)
    for at in np.ndindex(*shape):
        nodes[at] = make(at)
    return ScalarArray(nodes, dtype)


def no_nodes(shape: int | Sequence[int]) -> NodeArray:
    """Returns an uninitialised array for nodes, to be filled by the caller."""
    return np.empty(shape, object)


def alone(node: Node) -> NodeArray:
    """Wraps one node in a zero-dimensional array."""
    nodes = no_nodes(())
    nodes[()] = node
    return nodes


def check_size(shape: tuple[int, ...], what: str = "an array") -> None:
    """Raises a `LoweringError` if an array has too many elements for one node each."""
    size = int(np.prod(shape))
    if size > MAX_SCALARS:
        raise LoweringError(
            f"{what} of shape {shape} has {size} numbers per environment, more than the {MAX_SCALARS} that fit "
            "on the chip. Keep less in the state, or make constant arrays a parameter that all environments share"
        )


def is_large(value: Value) -> bool:
    """Returns whether an array's elements are computed or loaded only when they are read."""
    return isinstance(value, ComputedArray | MemoryArray)


def is_traced(array: Any) -> bool:
    """Returns whether an array is a JAX tracer, whose elements are not known yet."""
    return isinstance(array, Tracer)


def shared_array(array: Any) -> Const | Uniform:
    """Wraps an array that all environments share: a `Const` if its elements are known, otherwise a `Uniform`.

    Random keys are always `Uniform`, because NumPy has no such type.
    """
    if is_traced(array) or (isinstance(array, jax.Array) and is_key(array.dtype)):
        return Uniform(array)
    return Const(np.asarray(array))


def is_shared(value: Value) -> bool:
    """Returns whether a value is equal for all environments."""
    return isinstance(value, Const | Uniform)


def positions(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of the given shape that holds each element's row-major index."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def is_output(x: Any) -> bool:
    """Returns whether an object is one result of a lowered function, and so a leaf of the tree of results."""
    return isinstance(x, Output)


def flat_nodes(value: Value | PrologueOutput) -> list[Node]:
    """Returns all nodes of a value in row-major order, including both nodes of a random key."""
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
    """Returns the nodes of a write, with its condition last."""
    condition = [] if write.condition is None else [write.condition]
    match write:
        case CellWrite(place, value):
            return [*([] if isinstance(place, int) else [place]), value, *condition]
        case FillWrite(_, captures):
            return [*captures, *condition]
    return condition


def is_same(one: Value, other: Value, same_node: Callable[[Node, Node], bool]) -> bool:
    """Returns whether two values of a lowered function are certainly equal."""
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
