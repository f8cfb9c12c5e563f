"""Regions, which build the nodes of programs.

Within a region, the same operation on the same operands is the same node. Nodes that no output depends on are not
part of the `Program`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.fusion.ir.fold import COMMUTATIVE, fold_node
from rollmill.fusion.ir.node import Node, Program


class Region:
    """Builds the nodes of a program. The body of each loop is built in a region of its own."""

    def __init__(self, outer: "Region | None" = None) -> None:
        self.outer = outer
        self.inputs: list[Node] = []
        self._made: dict[Any, Node] = {}
        self._captured: dict[Node, Node] = {}

    def input(self, dtype: Any, width: int | None = None) -> Node:
        """Returns a node for a new input of the program, a scalar or a row."""
        node = Node("input", (), (len(self.inputs),), np.dtype(dtype), width, self)
        self.inputs.append(node)
        return node

    def constant(self, value: bool | int | float | np.generic, dtype: Any) -> Node:
        """Returns a node for a constant. Integers wrap around as in their dtype."""
        if self.outer is not None:
            return self.outer.constant(value, dtype)
        dtype = np.dtype(dtype)
        number = np.asarray(value).astype(dtype).item()
        # The key is the `repr`, because 0.0 and -0.0 are equal but different constants, and NaN does not equal
        # itself.
        key = ("constant", repr(number), dtype)
        return self._once(key, lambda: Node("constant", (), (number,), dtype))

    def uniform(self, slot: int, place: int, dtype: Any, width: int | None = None) -> Node:
        """Returns a node that reads a scalar or a row from a uniform array, which all environments share."""
        if self.outer is not None:
            return self.outer.uniform(slot, place, dtype, width)
        dtype = np.dtype(dtype)
        # The slot determines the dtype, which is therefore not part of the key.
        key = ("uniform", slot, place, width)
        return self._once(key, lambda: Node("uniform", (), (slot, place), dtype, width))

    def emit(
        self, op: str, *operands: Node, dtype: Any, width: int | None = None, attributes: tuple[Any, ...] = ()
    ) -> Node:
        """Returns a node for the result of an operation, hoisted out of loops that it does not depend on."""
        # An element of a large array is computed by its reader, possibly inside a loop that began later.
        for operand in operands:
            if operand.region is not self and operand.region is not None and operand.region.is_inside(self):
                return operand.region.emit(op, *operands, dtype=dtype, width=width, attributes=attributes)
        # Loop-invariant code motion: if no operand was created in this loop's body, the operation is created in
        # the enclosing region, and so on outwards.
        if self.outer is not None and all(operand.region is not self for operand in operands):
            return self.outer.emit(op, *operands, dtype=dtype, width=width, attributes=attributes)
        dtype = np.dtype(dtype)
        inside = tuple(self.inside(operand) for operand in operands)
        simpler = fold_node(self, op, inside, attributes, dtype, width)
        if simpler is not None:
            return simpler if simpler.width == width else self.emit("splat", simpler, dtype=dtype, width=width)
        # Looks up the exchanged operands instead of sorting them, because nodes have no order that all processes
        # share.
        if op in COMMUTATIVE and (found := self._made.get((op, inside[::-1], attributes, dtype, width))):
            return found
        key = (op, inside, attributes, dtype, width)
        return self._once(key, lambda: Node(op, inside, attributes, dtype, width, self))

    def is_inside(self, other: "Region") -> bool:
        """Returns whether this region belongs to a loop within another region."""
        outer = self.outer
        while outer is not None and outer is not other:
            outer = outer.outer
        return outer is other

    def inside(self, node: Node) -> Node:
        """Returns the node that represents `node` in this region. A node of an outer region becomes an input."""
        if node.region is None or node.region is self:
            return node
        # The outer node stays unchanged. The loop's program reads it through an input.
        if node not in self._captured:
            self._captured[node] = self.input(node.dtype, node.width)
        return self._captured[node]

    @property
    def captures(self) -> list[Node]:
        """Nodes of outer regions used in this region, in the order of the inputs that represent them."""
        return list(self._captured)

    @property
    def size(self) -> int:
        """Number of nodes made in this region, used or not."""
        return len(self._made)

    def is_same(self, one: Node, other: Node) -> bool:
        """Returns whether two nodes stand for the same node inside this region."""
        return self._captured.get(one, one) is self._captured.get(other, other)

    def program(self, outputs: Sequence[Node]) -> Program:
        """Returns the program that computes these nodes from the region's inputs."""
        inside = tuple(self.inside(node) for node in outputs)  # may capture further nodes from outside
        return Program(tuple(self.inputs), inside)

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
