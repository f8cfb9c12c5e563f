"""Lowering rules of JAX primitives, grouped into modules by kind."""

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
    """Registers the lowering rule of a custom JAX primitive.

    Args:
        primitive: name of the primitive in a jaxpr.
        rule: function that lowers the primitive (`Rule`).

    Raises:
        UsageError: the primitive already has a rule.
    """
    if primitive in RULES:
        raise UsageError(
            f"the primitive {primitive!r} already has a rule. hint: give your primitive another name."
        )
    RULES[primitive] = rule
