"""A step of an optimiser on a network as one vector, as programs of ONE of its numbers.

Shape letters: `S` numbers of the network.
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
from rollmill.fusion.kernels.descent_plan import DescentPlan, computed, plan_of
from rollmill.fusion.lower.function import LoweredFunction, lower_function
from rollmill.fusion.lower.values import ScalarArray, is_output

WRITTEN = {
    *("abs", "add", "add_any", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "pow", "rsqrt"),
    *("sign", "sqrt", "square", "sub", "tanh", "eq", "ge", "gt", "le", "lt", "ne", "select_n"),
    *("broadcast_in_dim", "convert_element_type", "copy"),
}
"""Operations on each number of a network, which do nothing but what they do to one."""


class DescentPrograms(NamedTuple):
    """The programs of a step."""

    plan: DescentPlan
    flat: tuple[Any, ...]
    """Variables of the state with a value for each number."""
    single: tuple[Any, ...]
    """Other variables of the state, such as counts."""
    sums: Program
    """From a number's gradient and its part of the state to what each sum adds for it. The last is its square."""
    step: Program
    """From a number's gradient, the number, its part of the state, the sums, and the single variables to the
    number after the step, and to what changes of its part of the state and of the single variables."""
    changed_flat: tuple[Any, ...]
    changed_single: tuple[Any, ...]


class Descended(NamedTuple):
    """A step that a kernel has computed."""

    results: Sequence[Array]
    """Weights and state after the step."""
    squares: Float[Array, ""]
    """Sum of the squares of all gradients."""


def descent_programs(program: core.ClosedJaxpr) -> DescentPrograms | None:
    """Returns the programs of a flat update. None if one of its operations has no counterpart for ONE number."""
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
            known.update(zip(equation.outvars, computed(equation, operands), strict=True))
    return known


def _read(known: dict[Any, Any], atom: Any) -> Any:
    """Returns the value of a variable of ONE number, or None if it is unknown."""
    if isinstance(atom, core.Literal):
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)
    return known.get(atom)
