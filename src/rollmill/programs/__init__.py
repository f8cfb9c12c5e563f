"""Compiled programs that train, evaluate and match policies: their kernels, devices, dispatch, and faults."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core
from jaxtyping import Array

from rollmill.core.errors import CannotFuse
from rollmill.lowerings.convolutions import Convolve, order_convolutions
from rollmill.lowerings.flat_descent import register_descent_code
from rollmill.lowerings.threefry import unroll_threefry
from rollmill.programs.threefry_code import register_threefry


def own_convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Convolve | None:
    """Returns a function that computes a convolution by machine code on a CPU, or None to leave it to XLA."""
    try:
        from rollmill.fusion.backends.cpu.convolutions import compile_convolution

        return compile_convolution(lhs, rhs, params)
    except (ImportError, CannotFuse):
        return None


def own_descent(operands: Sequence[Any], jaxpr: core.ClosedJaxpr, count: int) -> Callable[..., list[Array]] | None:
    """Returns a function that computes an optimiser step by machine code on a CPU, or None to leave it to XLA."""
    try:
        from rollmill.fusion.backends.cpu.descents import compile_descent

        return compile_descent(operands, jaxpr, count)
    except (ImportError, CannotFuse):
        return None


unroll_threefry(register_threefry)  # called before this package compiles anything
order_convolutions(own_convolution)
register_descent_code(own_descent)
