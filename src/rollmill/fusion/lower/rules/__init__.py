"""Lowering rules of primitives, in a module for each group."""

from rollmill.core.errors import UsageError
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
    special,
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
    **special.RULES,
}


def register_rule(primitive: str, rule: Rule) -> None:
    """Registers a custom primitive with the compiler.

    Args:
        primitive: its name in a jaxpr.
        rule: function from operands to results (`Rule`).

    Raises:
        UsageError: the primitive has a rule already.
    """
    if primitive in RULES:
        raise UsageError(
            f"the primitive {primitive!r} already has a rule. hint: give your primitive another name."
        )
    RULES[primitive] = rule


__all__ = ["RULES", "register_rule"]
