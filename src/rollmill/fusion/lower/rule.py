"""The interface of rules: the equation of a jaxpr that a rule sees, and the protocol of a rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.core import ShapedArray

from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import Value


class Equation(NamedTuple):
    """A primitive with its parameters and the types of its outputs."""

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
    """Lowers one primitive: `(ctx, equation, operands) -> results`.

    Raises:
        LoweringError: kernels do not support this case.
    """

    def __call__(self, ctx: Lowering, equation: Equation, values: Sequence[Value], /) -> list[Value]:
        """One value for each output; those that nobody needs may be anything."""
        ...
