"""What each primitive comes to in nodes; one module for each group of them."""

from rollmill.fusion.equation import Rule
from rollmill.fusion.rules import (
    calls,
    control,
    elementwise,
    indexing,
    products,
    random,
    reductions,
    scattering,
    shapes,
    sorting,
)

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **indexing.RULES,
    **scattering.RULES,
    **reductions.RULES,
    **sorting.RULES,
    **products.RULES,
    **calls.RULES,
    **control.RULES,
    **random.RULES,
}

__all__ = ["RULES"]
