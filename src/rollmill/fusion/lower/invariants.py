"""Finds which values that a step carries are constant, and which are always equal.

An observation often repeats parts of the state, and contains values that never change, such as an agent's number.
A kernel that carried all of them would run out of registers. A property that holds initially, and that every step
preserves, always holds. The module assumes all properties of the initial state, and drops those that a step does
not preserve. See Wegman and Zadeck, "Constant propagation with conditional branches" (TOPLAS 1991), and Alpern,
Wegman and Zadeck, "Detecting equality of variables in programs" (POPL 1988).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.values import Const, Output, ScalarArray


@dataclass(frozen=True, slots=True)
class ConstLabel:
    """Label of an element that is known to be constant, in the search for a step's invariants."""

    value: bool | int | float = field(compare=False)
    dtype: np.dtype
    text: str = field(init=False, repr=False)
    """The value as a string for comparisons, in which zeros have signs and NaN equals itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", repr(self.value))


ValueClasses: TypeAlias = tuple[tuple[Hashable, ...] | None, ...]
"""A label for each element of each leaf, in row-major order. Elements with the same label are always equal, and a
`ConstLabel` gives their value. None for a leaf held in rows, about which nothing is assumed."""


def labels_of(begun: Sequence[Output]) -> ValueClasses:
    """Returns a label for each element of the carried leaves in the initial state.

    Constant elements are labelled with their value, and elements that are certainly equal share a label.
    """
    return _renumber([_labels(value) for value in begun])


def meet(labels: ValueClasses, after: Sequence[Output]) -> ValueClasses:
    """Returns the labels that still hold after a step, of the labels that were assumed when the step was lowered.

    Elements that the step makes different, or changes from their constant, lose their common label.
    """
    return _renumber([_keep_labels(*pair) for pair in zip(labels, after, strict=True)])


def _labels(value: Output) -> list[Hashable] | None:
    """Returns a label for each number of a leaf, or None for a leaf in rows."""
    match value:
        case Const(array):
            return [ConstLabel(number.item(), array.dtype) for number in array.reshape(-1)]
        case ScalarArray(nodes):
            return [_label(node) for node in nodes.reshape(-1)]
    return None


def _label(node: Node) -> Hashable:
    return ConstLabel(node.value, node.dtype) if node.op == "constant" else node


def _keep_labels(before: tuple[Hashable, ...] | None, value: Output) -> list[Hashable] | None:
    """Returns the labels after a step: constants that stay constant, and equal values that stay equal."""
    after = _labels(value)
    if before is None or after is None:
        return None
    # Pairs of labels split classes: two elements stay equal if they were assumed equal and are equal after the
    # step. A constant that was not assumed holds after this step, but not before the first.
    is_known = lambda one, other: isinstance(one, ConstLabel) and one == other
    return [one if is_known(one, other) else (one, other) for one, other in zip(before, after, strict=True)]


def _renumber(leaves: Sequence[Sequence[Hashable] | None]) -> ValueClasses:
    """Renumbers labels, so that equivalent labellings are equal."""
    numbers: dict[Hashable, int] = {}

    def number(label: Hashable) -> Hashable:
        return label if isinstance(label, ConstLabel) else numbers.setdefault(label, len(numbers))

    # Numbered in the order of first appearance, so that equal partitions can be compared.
    return tuple(None if labels is None else tuple(map(number, labels)) for labels in leaves)
