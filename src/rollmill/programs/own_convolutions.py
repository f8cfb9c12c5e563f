"""Convolutions as machine code of this process, where LLVM is installed."""

from typing import Any

from rollmill.core.convolutions import Convolve
from rollmill.fusion.errors import CannotFuse


def own_convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Convolve | None:
    """The function that computes a convolution on a CPU; None where XLA is to compute it."""
    try:
        from rollmill.fusion.backends.cpu.convolutions import machine_code_for

        return machine_code_for(lhs, rhs, params)
    except (ImportError, CannotFuse):
        return None
