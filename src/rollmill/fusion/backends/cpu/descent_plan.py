"""Splits an optimiser's update into sums over all weights, scalar computations, and element-wise operations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from rollmill.fusion.backends.cpu.elementwise import emitter_for

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
"""JAX primitives that call another jaxpr, with the name of the parameter that holds it."""


class DescentPlan(NamedTuple):
    """The equations of an optimiser's update, in groups that are computed one after the other.

    A variable is *wide* if it has one element per weight, and *single* if it is a scalar.
    """

    program: Any
    """The jaxpr of the update, with calls inlined."""
    before: list[Any]
    """Wide equations that the sums depend on. They read no single variables."""
    sums: list[Any]
    singles: list[Any]
    """Equations between single variables, in order."""
    wide: list[Any]
    given: list[Any]
    """Single variables that wide equations read."""
    divisors: set[Any]
    """The variables of `given` that are used only as divisors."""


def plan_of(program: core.ClosedJaxpr) -> DescentPlan | None:
    """Plans an optimiser's update. Returns None if an operation is unsupported or a sum depends on a scalar."""
    flat = jax.make_jaxpr(lambda *values: _without_calls(program.jaxpr, program.consts, values))(*program.in_avals)
    length = flat.jaxpr.invars[0].aval.shape
    is_wide = lambda atom: atom.aval.shape == length
    groups = {"wide": [], "sum": [], "single": [], "other": []}
    for equation in flat.jaxpr.eqns:
        groups[_kind(equation, is_wide)].append(equation)
    before = _find_needed(groups["wide"], [equation.invars[0] for equation in groups["sum"]])
    wide = _find_needed(groups["wide"], [atom for atom in flat.jaxpr.outvars if is_wide(atom)])
    given, early = (_singles(equations, is_wide) for equations in (wide, before))
    types_are_known = all(atom.aval.dtype in (np.float32, np.bool_) for atom in given)
    if flat.consts or groups["other"] or early or not types_are_known:
        return None
    return DescentPlan(flat.jaxpr, before, groups["sum"], groups["single"], wide, given, _divisors(wide, given))


def _kind(equation: Any, is_wide: Callable[[Any], bool]) -> str:
    """Returns the group of an equation, or `other` if it has no code."""
    if all(map(is_wide, equation.outvars)):
        return "wide" if _has_code(equation, is_wide) else "other"
    if not any(map(is_wide, equation.invars)):
        return "single"
    is_sum = equation.primitive.name == "reduce_sum" and equation.outvars[0].aval.shape == ()
    return "sum" if is_sum else "other"


def _singles(equations: Sequence[Any], is_wide: Callable[[Any], bool]) -> list[Any]:
    """Returns the single variables that equations use."""
    atoms = [atom for equation in equations for atom in equation.invars]
    return list(dict.fromkeys(atom for atom in atoms if not _is_literal(atom) and not is_wide(atom)))


def _divisors(equations: Sequence[Any], given: Sequence[Any]) -> set[Any]:
    """Returns the single variables that equations divide by and use for nothing else."""
    divides = lambda equation, place: equation.primitive.name == "div" and place == 1
    uses = [(equation, place) for equation in equations for place in range(len(equation.invars))]
    others = [e.invars[n] for e, n in uses if not divides(e, n)]
    return {atom for atom in given if not any(atom is other for other in others)}


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _has_code(equation: Any, is_wide: Callable[[Any], bool]) -> bool:
    """Returns whether a wide equation has code. Its operands may be wide or single."""
    atoms = [*equation.invars, *equation.outvars]
    types = {atom.aval.dtype for atom in atoms}
    fits = all(is_wide(atom) or atom.aval.shape == () for atom in atoms)
    return (
        fits
        and emitter_for(equation.primitive.name, equation.params) is not None
        and types <= {np.dtype(np.float32), np.dtype(np.bool_)}
    )


def _find_needed(equations: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Returns the equations that these variables depend on."""
    needed, found = {atom for atom in wanted if not _is_literal(atom)}, []
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            needed.update(atom for atom in equation.invars if not _is_literal(atom))
            found.append(equation)
    return found[::-1]


def _without_calls(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a program one operation at a time, including the programs it calls."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    read = lambda atom: atom.val if _is_literal(atom) else known[atom]
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in CALLS:
            called = equation.params[CALLS[equation.primitive.name]]
            results = _without_calls(called.jaxpr, called.consts, operands)
        else:
            results = evaluate_equation(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def evaluate_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a jaxpr with these operands, and returns its results."""
    results = equation.primitive.bind(*operands, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]
