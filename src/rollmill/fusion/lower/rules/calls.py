"""Lowers calls by inlining them, and conditionals by computing all branches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.types import is_key
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.elementwise import one_of
from rollmill.fusion.lower.rules.products import expand_outer_products, one_of_sums
from rollmill.fusion.lower.values import Const, Value, is_same, is_shared, shared_array

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
}
"""Primitives that are inlined, with the name of the parameter that holds the called jaxpr."""

UNNEEDED = Const(np.zeros(0))
"""Placeholder for results that nothing uses."""


def _call(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    called = equation.params[INLINED[equation.primitive]]
    return ctx.read(called, values, ctx, equation.needed, keeps_products=True)


def _linear_solve(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Lowers `jax.lax.custom_linear_solve` by lowering its solver for the right-hand sides."""
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    sides = values[first + lengths.solve + lengths.transpose_solve :]
    operands = [*values[first : first + lengths.solve], *sides]
    return ctx.read(equation.params["jaxprs"].solve, operands, ctx, equation.needed)


def _expand(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Primitives that expand into others, as some functions of jax.numpy are from jax 0.12 on."""
    primitive = equation.params["_prim"]

    def expand(*leaves: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))

    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    return ctx.read(jax.make_jaxpr(expand)(*structs), values, ctx, equation.needed, keeps_products=True)


def _cond(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    index, *operands = values
    branches = equation.params["branches"]
    if isinstance(index, Const):
        taken = branches[int(np.clip(index.array, 0, len(branches) - 1))]
        return ctx.read(taken, operands, ctx, equation.needed, keeps_products=True)
    results = [ctx.read(branch, operands, ctx, equation.needed, keeps_products=True) for branch in branches]
    cases = zip(equation.needed, zip(*results, strict=True), strict=True)
    return [_merge(ctx, index, case) if needed else UNNEEDED for needed, case in cases]


def _merge(ctx: Lowering, index: Value, cases: Sequence[Value]) -> Value:
    """Returns the result of the branch taken."""
    if all(is_same(case, cases[0], ctx.region.is_same) for case in cases[1:]):
        return cases[0]
    if all(map(is_shared, (index, *cases))) and not is_key(cases[0].dtype):
        arrays = [jnp.asarray(ctx.array(case)) for case in cases]
        return shared_array(jax.lax.select_n(jnp.asarray(ctx.array(index)), *arrays))
    sums = one_of_sums(ctx, index, cases)
    return sums if sums is not None else one_of(ctx, index, [expand_outer_products(ctx, case) for case in cases])


RULES: dict[str, Rule] = {
    **dict.fromkeys(INLINED, _call),
    "custom_linear_solve": _linear_solve,
    "call_hi_primitive": _expand,
    "cond": _cond,
}
