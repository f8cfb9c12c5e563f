"""Kernel programs for a step of the optimiser on a network that is flattened to one vector.

Each program computes a single element of the vector.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, Float

from rollmill.core.errors import CannotFuse
from rollmill.fusion.ir import Program
from rollmill.fusion.kernels.descent_plan import DescentPlan, evaluate_equation, plan_of
from rollmill.fusion.lower.function import LoweredFunction, lower_function
from rollmill.fusion.lower.values import ScalarArray, is_output

WRITTEN = {
    *("abs", "add", "add_any", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "pow", "rsqrt"),
    *("sign", "sqrt", "square", "sub", "tanh", "eq", "ge", "gt", "le", "lt", "ne", "select_n"),
    *("broadcast_in_dim", "convert_element_type", "copy"),
}
"""Elementwise operations, which can be computed for each element of the network separately."""


class DescentPrograms(NamedTuple):
    """The kernel programs of one optimiser step, and the variables that they read and change."""

    plan: DescentPlan
    flat: tuple[Any, ...]
    """Variables of the optimiser state that have a value for each element, such as moments."""
    single: tuple[Any, ...]
    """Scalar variables of the optimiser state, such as counts."""
    sums: Program
    """Computes the terms of one element in each sum from its gradient and state, the squared gradient last."""
    step: Program
    """Computes one element after the step, and the variables that the step changes, from the element, its gradient
    and state, the sums, and the scalar variables."""
    changed_flat: tuple[Any, ...]
    changed_single: tuple[Any, ...]


class Descended(NamedTuple):
    """Results of an optimiser step computed by a kernel."""

    results: Sequence[Array]
    """Weights and state after the step."""
    squares: Float[Array, ""]
    """Sum of the squares of all gradients."""


def descent_programs(program: core.ClosedJaxpr) -> DescentPrograms | None:
    """Returns the programs of an update of a flat network, or None if one of its operations is not elementwise."""
    plan = plan_of(program, lambda name, params: name in WRITTEN)
    if plan is None:
        return None
    jaxpr = plan.program
    length = jaxpr.invars[0].aval.shape
    is_wide = lambda atom: atom.aval.shape == length
    flat = tuple(atom for atom in jaxpr.invars[1:] if is_wide(atom))
    single = tuple(atom for atom in jaxpr.invars[1:] if not is_wide(atom))
    changed = [atom for atom in jaxpr.outvars[1:] if isinstance(atom, core.Var) and atom not in jaxpr.invars]
    changed_flat = tuple(dict.fromkeys(atom for atom in changed if is_wide(atom)))
    changed_single = tuple(dict.fromkeys(atom for atom in changed if not is_wide(atom)))
    avals: list[Any] = [atom.aval for atom in (*single, *changed_single)]
    if any(aval.shape or aval.dtype.name not in SINGLES for aval in avals):
        return None
    sums = [equation.invars[0] for equation in plan.sums]
    totals = tuple(equation.outvars[0] for equation in plan.sums)

    def sums_of_one(gradient: Array, parts: tuple[Array, ...]) -> list[Array]:
        known = _of_one(jaxpr, {jaxpr.invars[0]: gradient, **dict(zip(flat, parts, strict=True))})
        return [*(_read(known, atom) for atom in sums), gradient * gradient]

    def step_of_one(gradient: Array, number: Array, *others: tuple[Array, ...]) -> list[Array]:
        given = {jaxpr.invars[0]: gradient}
        for atoms, values in zip((flat, totals, single), others, strict=True):
            given |= dict(zip(atoms, values, strict=True))
        known = _of_one(jaxpr, given)
        moved = number + _read(known, jaxpr.outvars[0])
        return [moved, *(_read(known, atom) for atom in (*changed_flat, *changed_single))]

    one = jax.ShapeDtypeStruct((), jnp.float32)
    each = lambda atoms: tuple(
        jax.ShapeDtypeStruct((), atom.aval.dtype, weak_type=atom.aval.weak_type) for atom in atoms
    )
    try:
        sums_program = _program_of(lower_function(sums_of_one, (one, each(flat))))
        step = _program_of(lower_function(step_of_one, (one, one, each(flat), each(totals), each(single))))
    except CannotFuse:
        return None
    if sums_program is None or step is None:
        return None
    return DescentPrograms(plan, flat, single, sums_program, step, changed_flat, changed_single)


SINGLES = ("float32", "int32", "uint32")
"""Types of single variables that a kernel reads and writes."""


def _program_of(lowered: LoweredFunction) -> Program | None:
    """Returns a program without uniform arrays whose outputs are all computed, or None."""
    results = jax.tree.leaves(lowered.outputs, is_leaf=is_output)
    are_computed = all(isinstance(result, ScalarArray) for result in results)
    return lowered.program if are_computed and not lowered.program.slots() else None


def _of_one(jaxpr: Any, known: dict[Any, Any]) -> dict[Any, Any]:
    """Computes all variables of ONE number that depend on nothing but the known ones."""
    for equation in jaxpr.eqns:
        if any(atom in known for atom in equation.outvars):
            continue
        operands = [_read(known, atom) for atom in equation.invars]
        if any(operand is None for operand in operands):
            continue
        if equation.primitive.name == "broadcast_in_dim":
            known[equation.outvars[0]] = operands[0]
        elif equation.primitive.name != "reduce_sum":
            known.update(zip(equation.outvars, evaluate_equation(equation, operands), strict=True))
    return known


def _read(known: dict[Any, Any], atom: Any) -> Any:
    """Returns the value of a scalar variable, or None if it is unknown."""
    if isinstance(atom, core.Literal):
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)
    return known.get(atom)
