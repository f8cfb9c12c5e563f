"""What a rule sees of an equation of a jaxpr, and what a rule is."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.core import ShapedArray

from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import Value


class Equation(NamedTuple):
    """A primitive with its parameters, and what comes out of it."""

    primitive: str
    params: dict[str, Any]
    outputs: tuple[ShapedArray, ...]
    needed: tuple[bool, ...]
    """Whether each output is read."""

    @property
    def dtype(self) -> Any:
        """The type of the first output."""
        return self.outputs[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.outputs[0].shape


@runtime_checkable
class Rule(Protocol):
    """What a primitive comes to: `(ctx, equation, operands) -> results`.

    Raises:
        LoweringError: there is no such thing in a kernel.
    """

    def __call__(self, ctx: Lowering, equation: Equation, values: Sequence[Value], /) -> list[Value]:
        """One value for each output; those that nobody needs may be anything."""
        ...
