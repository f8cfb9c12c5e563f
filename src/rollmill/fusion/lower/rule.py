"""The interface of lowering rules: the part of a jaxpr equation that a rule sees, and the protocol of a rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.core import ShapedArray

from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import Value


class Equation(NamedTuple):
    """One equation of a jaxpr: the primitive, its parameters, and the types of its outputs."""

    primitive: str
    params: dict[str, Any]
    outputs: tuple[ShapedArray, ...]
    needed: tuple[bool, ...]
    """Whether each output is used."""

    @property
    def dtype(self) -> Any:
        """Dtype of the equation's first output."""
        return self.outputs[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the equation's first output."""
        return self.outputs[0].shape


@runtime_checkable
class Rule(Protocol):
    """Lowers one primitive: `(context, equation, operands) -> results`.

    Raises:
        LoweringError: this use of the primitive is not supported in kernels.
    """

    def __call__(self, ctx: Lowering, equation: Equation, values: Sequence[Value], /) -> list[Value]:
        """Returns one value for each output. Values of outputs that are not needed may be anything."""
        ...
