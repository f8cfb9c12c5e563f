"""Operations that programs on CPUs compute by machine code of this process, where LLVM is installed."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core
from jaxtyping import Array

from rollmill.core.convolutions import Convolve
from rollmill.core.errors import CannotFuse


def own_convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Convolve | None:
    """The function that computes a convolution on a CPU; None where XLA is to compute it."""
    try:
        from rollmill.fusion.backends.cpu.convolutions import machine_code_for

        return machine_code_for(lhs, rhs, params)
    except (ImportError, CannotFuse):
        return None


def own_descent(
    operands: Sequence[Any], program: core.ClosedJaxpr, count: int
) -> Callable[..., list[Array]] | None:
    """The function that computes a step of an optimiser on a CPU; None where XLA is to compute it."""
    try:
        from rollmill.fusion.backends.cpu.descents import machine_code_for

        return machine_code_for(operands, program, count)
    except (ImportError, CannotFuse):
        return None
