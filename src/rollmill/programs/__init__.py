"""Compiled programs that train, evaluate and match policies: their kernels, devices, dispatch, and faults."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core
from jaxtyping import Array

from rollmill.core.convolutions import Convolve, order_convolutions
from rollmill.core.errors import CannotFuse
from rollmill.core.flat_descent import compute_descents_by
from rollmill.core.threefry import unroll_threefry


def own_convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Convolve | None:
    """Returns a function that computes a convolution by machine code on a CPU, or None to leave it to XLA."""
    try:
        from rollmill.fusion.backends.cpu.convolutions import machine_code_for

        return machine_code_for(lhs, rhs, params)
    except (ImportError, CannotFuse):
        return None


def own_descent(
    operands: Sequence[Any], program: core.ClosedJaxpr, count: int
) -> Callable[..., list[Array]] | None:
    """Returns a function that computes an optimiser step by machine code on a CPU, or None to leave it to XLA."""
    try:
        from rollmill.fusion.backends.cpu.descents import machine_code_for

        return machine_code_for(operands, program, count)
    except (ImportError, CannotFuse):
        return None


unroll_threefry()  # called before this package compiles anything
order_convolutions(own_convolution)
compute_descents_by(own_descent)
