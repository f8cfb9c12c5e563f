"""Lowering rules of primitives; one module for each group of them."""

from rollmill.fusion.lower.rule import Rule
from rollmill.fusion.lower.rules import (
    calls,
    control,
    convolutions,
    elementwise,
    indexing,
    linear,
    products,
    random,
    reductions,
    scattering,
    shapes,
    sorting,
    windows,
)

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **indexing.RULES,
    **scattering.RULES,
    **reductions.RULES,
    **sorting.RULES,
    **products.RULES,
    **convolutions.RULES,
    **windows.RULES,
    **linear.RULES,
    **calls.RULES,
    **control.RULES,
    **random.RULES,
}

__all__ = ["RULES"]
