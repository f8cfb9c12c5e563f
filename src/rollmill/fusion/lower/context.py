"""The context of lowering: creates nodes, and converts values to scalars, rows, or arrays of the prologue."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rollmill.core.types import is_key
from rollmill.fusion.ir import COMPARISONS, Node, Region
from rollmill.fusion.lower.prologue import PrologueBuilder
from rollmill.fusion.lower.values import (
    MAX_COLUMNS,
    ComputedArray,
    Concat,
    Const,
    KeyPair,
    LoweringError,
    MemoryArray,
    NodeArray,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    check_size,
    fill_nodes,
    flat_nodes,
    positions,
)


class Lowering(NamedTuple):
    """State passed to lowering rules: the region to which they append nodes, the builder of the prologue, and the
    function that lowers nested jaxprs.
    """

    region: Region
    prologue: PrologueBuilder
    read: Callable[..., list[Value]]
    """The function `lower_jaxpr`, with which rules lower the jaxprs that a primitive calls."""

    def inside(self) -> "Lowering":
        """Returns a context whose nodes belong to the body of a loop."""
        return self._replace(region=Region(self.region))

    def apply(self, op: str, *nodes: Node, dtype: Any = None) -> Node:
        """Returns the node of an operation in `operations.OPERATIONS`. It is a row if an operand is a row."""
        width = next((node.width for node in nodes if node.width is not None), None)
        # Merges a bias with an earlier uniform addend, so that two uniform rows become one.
        if op == "add" and width is not None:
            nodes = self._with_one_uniform(*nodes)
        if dtype is None:
            dtype = np.bool_ if op in COMPARISONS or op == "is_finite" else nodes[op == "select"].dtype
        return self.region.emit(op, *nodes, dtype=dtype, width=width)

    def _with_one_uniform(self, one: Node, other: Node) -> tuple[Node, Node]:
        """Returns the operands of a sum, in which two successive uniform rows are replaced by their sum.

        The sum is then rounded in another order than by XLA, as sums of products are.
        """
        for last, before in ((one, other), (other, one)):
            if before.op != "add" or not _is_uniform_row(last):
                continue
            for rest, first in (before.operands, before.operands[::-1]):
                if _is_uniform_row(first) and first.width == last.width:
                    return rest, self.uniform_row(self.prologue.added(first, last))
        return one, other

    def uniform_row(self, array: Array) -> Node:
        """Returns the node that reads a uniform array `[width]` as a row."""
        return self.region.uniform(self.prologue.slot(array), 0, array.dtype, array.size)

    def constant(self, value: Any, dtype: Any) -> Node:
        """Returns a program node for a constant of `dtype`."""
        return self.region.constant(value, dtype)

    # --- beside the kernel ------------------------------------------------------------------------------

    def array(self, value: Value) -> Any:
        """Returns a constant or uniform value as an array for the prologue."""
        match value:
            case Const(array):
                return array
            case Uniform():
                return self.prologue.picked(value)
        raise TypeError(f"expected a value that all environments share, got {type(value).__name__}")

    # --- as scalars -------------------------------------------------------------------------------------

    def scalars(self, value: Value) -> ScalarArray:
        """Converts a value to one scalar node per element.

        Raises a `LoweringError` if the value has too many elements, or rows that are too wide to split.
        """
        match value:
            case ScalarArray():
                return value
            case Const(array):
                return fill_nodes(
                    value.shape, value.dtype, lambda at: self.region.constant(array[at].item(), array.dtype)
                )
            case Uniform():
                return self._uniform_keys(value) if is_key(value.dtype) else self._uniform_scalars(value)
            case RowArray(nodes, _, dtype):
                check_columns(value)
                return fill_nodes(value.shape, dtype, lambda at: self.column(nodes[at[:-1]], at[-1]))
            case Concat(parts):
                check_size(value.shape)
                return ScalarArray(
                    np.concatenate([self.scalars(part).nodes for part in parts], axis=-1), value.dtype
                )
            case ComputedArray() | MemoryArray():
                check_size(value.shape)
        raise TypeError(f"expected a value that was expanded before, got {type(value).__name__}")

    def scalar(self, value: Value) -> Node:
        """Returns the scalar node of a value with one element."""
        return self.scalars(value).nodes.reshape(-1)[0]

    def _uniform_scalars(self, value: Uniform) -> ScalarArray:
        check_size(value.shape)
        slot = self.prologue.slot(value.array)
        places = positions(value.shape) if value.places is None else value.places
        return fill_nodes(
            value.shape, value.dtype, lambda at: self.region.uniform(slot, int(places[at]), value.dtype)
        )

    def _uniform_keys(self, value: Uniform) -> ScalarArray:
        data = jax.random.key_data(self.prologue.picked(value))
        return self.keys(self.scalars(Uniform(data)), value.dtype)

    def keys(self, data: ScalarArray, dtype: Any) -> ScalarArray:
        """Converts the data of random keys, `[..., 2]`, to a value of random keys."""
        return fill_nodes(data.shape[:-1], dtype, lambda at: KeyPair(data.nodes[(*at, 0)], data.nodes[(*at, 1)]))

    def key_data(self, value: Value) -> ScalarArray:
        """Converts a value of random keys to their data, `[..., 2]`."""
        nodes = np.empty((int(np.prod(value.shape)), 2), object)
        for place, key in enumerate(self.scalars(value).nodes.flat):
            nodes[place, 0], nodes[place, 1] = key.first, key.second
        return ScalarArray(nodes.reshape((*value.shape, 2)), np.dtype(np.uint32))

    def column(self, row: Node, place: int) -> Node:
        """Returns the node of one column of a row, a scalar."""
        return self.region.emit("column", row, dtype=row.dtype, attributes=(int(place),))

    # --- as rows ----------------------------------------------------------------------------------------

    def rows(self, value: Value) -> RowArray:
        """Converts a value to one row node for each vector along the last axis.

        Raises a `LoweringError` if rows would have to be concatenated and are too wide to split.
        """
        if isinstance(value, RowArray):
            return value
        return self.rows_of(self.row_operands(value, value.shape), value.shape[-1], value.dtype)

    def rows_of(self, nodes: NodeArray, width: int, dtype: Any) -> RowArray:
        """Converts nodes to an array of rows. Scalars are repeated in all columns."""
        splat = lambda node: self.region.emit("splat", node, dtype=dtype, width=width)
        whole = lambda node: splat(node) if node.width is None else node
        return RowArray(fill_nodes(nodes.shape, dtype, lambda at: whole(nodes[at])).nodes, width, dtype)

    def row_operands(self, value: Value, shape: tuple[int, ...]) -> NodeArray:
        """Returns a node for each vector along the last axis, as an operand of an element-wise operation.

        The operation's result has the shape `shape`. A vector whose elements are all equal becomes a scalar node.
        """
        if isinstance(value, RowArray):
            nodes = value.nodes
        elif not value.shape or value.shape[-1] == 1:
            nodes = self.scalars(value).nodes.reshape(value.shape[:-1])
        elif isinstance(value, Const):
            nodes = self._known_rows(value.array)
        elif isinstance(value, Uniform):
            nodes = self._uniform_rows(value)
        else:
            nodes = self._stacked_rows(self.scalars(value))
        return np.broadcast_to(nodes, shape[:-1])

    def _known_rows(self, array: np.ndarray) -> NodeArray:
        first = positions(array.shape)[..., 0]

        def row(at: tuple[int, ...]) -> Node:
            # A row with equal elements is a scalar, unless its zeros differ in sign, because 0 and -0 compare as
            # equal.
            if np.all(array[at] == array[at][0]) and not np.any(np.diff(np.signbit(array[at].astype(np.float32)))):
                return self.region.constant(array[at][0].item(), array.dtype)
            return self.region.uniform(self.prologue.slot(array), int(first[at]), array.dtype, array.shape[-1])

        return fill_nodes(array.shape[:-1], array.dtype, row).nodes

    def _uniform_rows(self, value: Uniform) -> NodeArray:
        width = value.shape[-1]
        places = positions(value.shape) if value.places is None else value.places
        alike, ordered = np.all(places == places[..., :1]), np.all(places == places[..., :1] + np.arange(width))
        # A row is read from adjacent elements of memory. Columns in another order are first copied next to each
        # other.
        if not alike and not ordered:
            return self._uniform_rows(Uniform(self.prologue.picked(value)))
        slot = self.prologue.slot(value.array)
        row = lambda at: self.region.uniform(slot, int(places[(*at, 0)]), value.dtype, None if alike else width)
        return fill_nodes(value.shape[:-1], value.dtype, row).nodes

    def _stacked_rows(self, parts: ScalarArray) -> NodeArray:
        def row(at: tuple[int, ...]) -> Node:
            nodes: Sequence[Node] = parts.nodes[at]
            # All columns are one node, and operations broadcast a scalar to the columns of a row.
            if all(node is nodes[0] for node in nodes):
                return nodes[0]
            return self.region.emit("stack", *nodes, dtype=parts.dtype, width=len(nodes))

        return fill_nodes(parts.shape[:-1], parts.dtype, row).nodes


def _is_uniform_row(node: Node) -> bool:
    return node.op == "uniform" and node.width is not None and node.dtype.kind == "f"


def check_columns(value: RowArray | Concat) -> None:
    """Raises a `LoweringError` if a value contains rows that are too wide to be split into scalars."""
    for part in value.parts if isinstance(value, Concat) else (value,):
        if isinstance(part, RowArray) and part.width > MAX_COLUMNS:
            raise LoweringError(
                f"an array of shape {part.shape} must be split into single numbers, for which the limit is "
                f"{MAX_COLUMNS} along the last axis"
            )


def fold_constant(value: Value) -> Value:
    """Converts a value that consists only of constant nodes to a `Const`, and returns other values unchanged."""
    if isinstance(value, ScalarArray) and not is_key(value.dtype):
        nodes = flat_nodes(value)
        if all(node.op == "constant" for node in nodes):
            array = np.array([node.value for node in nodes]).astype(value.dtype)
            return Const(array.reshape(value.shape))
    return value
