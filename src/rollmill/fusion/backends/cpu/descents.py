"""Machine code for optimiser steps that reads each gradient, weight and moment only once."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import FLOAT32, FLOATS, INT32, Emitter, Value
from rollmill.fusion.backends.cpu.descent_plan import DescentPlan, evaluate_equation, plan_of
from rollmill.fusion.backends.cpu.elementwise import emitter_for
from rollmill.fusion.backends.cpu.ffi import NativeKernel, call, new_program
from rollmill.fusion.backends.cpu.memory import ALIGNMENT
from rollmill.fusion.backends.cpu.target import processor

FLOAT = FLOATS["float32"]
PROGRAM_NUMBERS = 2**15
MAX_PROGRAMS = 64
"""Maximum number of partial sums. It does not depend on the number of cores, so that results do not either."""


class _FlatLeaf(NamedTuple):
    """Position of a leaf of the weights in the flat vector."""

    first: int
    """Index of its first number."""
    count: int


def compile_descent(
    operands: Sequence[Any], jaxpr: core.ClosedJaxpr, count: int
) -> Callable[..., list[Array]] | None:
    """Returns a function that runs an optimiser step as machine code, or None if the step is unsupported.

    `operands` are the shapes and dtypes of all leaves of the weights (`count` of them), the gradients and the
    optimiser state. `jaxpr` maps flat gradients and the state to the flat update and the next state.
    """
    leaves, first = [], 0
    for operand in operands[:count]:
        leaves.append(_FlatLeaf(first, math.prod(operand.shape)))
        first += leaves[-1].count
    plan = plan_of(jaxpr)
    if plan is None or any(leaf.count == 0 for leaf in leaves):
        return None
    return lambda *values: _descend(plan, leaves, values[:count], values[count : 2 * count], values[2 * count :])


def _descend(plan: DescentPlan, leaves: list[_FlatLeaf], weights: Any, gradients: Any, state: Any) -> list[Array]:
    jaxpr = plan.program
    known = dict(zip(jaxpr.invars[1:], state, strict=True))
    flat_atoms = [atom for atom in jaxpr.invars[1:] if _is_wide(plan, atom)]
    flat = [known[atom] for atom in flat_atoms]
    if plan.sums:
        (parts,) = call(_sum_code(plan, leaves, flat_atoms), [*gradients, *flat])
        known |= {equation.outvars[0]: total for equation, total in zip(plan.sums, jnp.sum(parts, 0), strict=True)}
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else known[atom]
    for equation in plan.singles:
        known.update(
            zip(equation.outvars, evaluate_equation(equation, list(map(read, equation.invars))), strict=True)
        )
    single = lambda atom: 1 / known[atom] if atom in plan.divisors else known[atom]
    given = jnp.stack([jnp.float32(0), *(single(atom).astype(jnp.float32) for atom in plan.given)])
    moved = call(_step_code(plan, leaves, flat_atoms), [given, *gradients, *weights, *flat])
    shaped = [one.reshape(leaf.shape) for one, leaf in zip(moved, weights, strict=False)]
    following = iter(moved[len(leaves) :])
    states = [next(following) if _is_wide(plan, atom) else read(atom) for atom in jaxpr.outvars[1:]]
    return [*shaped, *states]


def _is_wide(plan: DescentPlan, atom: Any) -> bool:
    return atom.aval.shape == plan.program.invars[0].aval.shape


def _programs(leaves: Sequence[_FlatLeaf]) -> int:
    return min(MAX_PROGRAMS, max(1, sum(leaf.count for leaf in leaves) // PROGRAM_NUMBERS))


def _sum_code(plan: DescentPlan, leaves: list[_FlatLeaf], flat: list[Any]) -> NativeKernel:
    """Returns code that computes partial sums `[programs, sums]` from gradients and flat vectors."""
    programs, lanes = _programs(leaves), processor().lanes
    emit, pointers, number, _ = new_program(lanes, len(leaves) + len(flat) + 1)
    totals = [emit.slot(emit.vector(FLOAT32)) for _ in plan.sums]
    for total in totals:
        emit.store(emit.constant(0), total, FLOAT32)
    for n, leaf in enumerate(leaves):
        for at in _vectors(emit, leaf, number, programs):
            values = {plan.program.invars[0]: at.load(pointers[n], 0)}
            values |= {a: at.load(p, leaf.first) for a, p in zip(flat, pointers[len(leaves) : -1], strict=True)}
            known = _values(emit, plan.before, values, {})
            for equation, total in zip(plan.sums, totals, strict=True):
                before = emit.load(total, FLOAT32)
                value = at.where_valid(known(equation.invars[0]))
                emit.store(emit.builder.fadd(before, value), total, FLOAT32)
    for n, total in enumerate(totals):
        vector, zero = emit.load(total, FLOAT32), ir.Constant(FLOAT, 0.0)
        name = f"llvm.vector.reduce.fadd.v{lanes}f32"
        whole = emit.call(name, zero, vector, result=FLOAT)
        spot = emit.at(pointers[-1], emit.builder.mul(number, emit.integer(len(totals))), FLOAT)
        emit.builder.store(whole, emit.at(spot, n, FLOAT), align=4)
    emit.builder.ret_void()
    shape = jax.ShapeDtypeStruct((programs, len(totals)), jnp.float32)
    return NativeKernel(emit.module, programs, ALIGNMENT, (shape,), written_out=True)


def _step_code(plan: DescentPlan, leaves: list[_FlatLeaf], flat: list[Any]) -> NativeKernel:
    """Returns code that computes weights and flat vectors after a step."""
    programs, jaxpr = _programs(leaves), plan.program
    step, *states = jaxpr.outvars
    wide = [atom for atom in states if _is_wide(plan, atom)]
    emit, pointers, number, _ = new_program(
        processor().lanes, 1 + 2 * len(leaves) + len(flat) + len(leaves) + len(wide)
    )
    given, pointers = pointers[0], iter(pointers[1:])
    groups = [[next(pointers) for _ in group] for group in (leaves, leaves, flat, leaves, wide)]
    gradients, weights, before, moved, after = groups
    single = _singles(emit, plan, given)
    for n, leaf in enumerate(leaves):
        for at in _vectors(emit, leaf, number, programs):
            values = {jaxpr.invars[0]: at.load(gradients[n], 0)}
            values |= {atom: at.load(p, leaf.first) for atom, p in zip(flat, before, strict=True)}
            known = _values(emit, plan.wide, values, single)
            at.store(emit.builder.fadd(at.load(weights[n], 0), known(step)), moved[n], 0)
            for atom, pointer in zip(wide, after, strict=True):
                at.store(known(atom), pointer, leaf.first)
    emit.builder.ret_void()
    size = sum(leaf.count for leaf in leaves)
    shapes = [*(leaf.count for leaf in leaves), *(size for _ in wide)]
    outputs = tuple(jax.ShapeDtypeStruct((each,), jnp.float32) for each in shapes)
    return NativeKernel(emit.module, programs, ALIGNMENT, outputs, written_out=True)


def _singles(emit: Emitter, plan: DescentPlan, given: Value) -> dict[Any, Value]:
    """Loads single values into all lanes. Divisors are loaded as their reciprocals."""
    found: dict[Any, Value] = {}
    given_atoms: list[Any] = plan.given
    for n, atom in enumerate(given_atoms, start=1):
        vector = emit.broadcast(emit.load_number(emit.at(given, n, FLOAT), FLOAT32))
        is_flag = np.dtype(atom.aval.dtype) == np.bool_
        found[atom] = emit.builder.fcmp_unordered("!=", vector, emit.constant(0)) if is_flag else vector
    return found


def _values(
    emit: Emitter, equations: Sequence[Any], values: dict[Any, Value], single: dict[Any, Value]
) -> Callable[[Any], Value]:
    """Writes equations for one vector, and returns a function that reads their variables."""
    known = {**single, **values}

    def read(atom: Any) -> Value:
        if not isinstance(atom, core.Literal):
            return known[atom]
        if np.asarray(atom.val).dtype == np.bool_:
            return ir.Constant(ir.VectorType(ir.IntType(1), emit.lanes), [int(atom.val)] * emit.lanes)
        return emit.constant(atom.val)

    for equation in equations:
        name = equation.primitive.name
        operands = [read(atom) for atom in equation.invars]
        if name == "div" and not isinstance(equation.invars[1], core.Literal) and equation.invars[1] in single:
            name = "mul"
        write = emitter_for(name, equation.params)
        assert write is not None
        known[equation.outvars[0]] = write(emit, *operands)
    return read


# --- the numbers of a leaf -------------------------------------------------------------------------------


class _LeafVector:
    """A vector of a leaf's elements. The last vector of a leaf may be shorter."""

    def __init__(self, emit: Emitter, first: Value, valid: int | None = None) -> None:
        self._emit, self._first = emit, first
        self._valid = None if valid is None else [lane < valid for lane in range(emit.lanes)]

    def load(self, pointer: Value, offset: int) -> Value:
        """Loads the elements at this position, with zeros past the end of the leaf."""
        emit, own = self._emit, self._spot(pointer, offset)
        if self._valid is None:
            return emit.load(own, FLOAT32)
        arguments = own, INT32(4), self._mask, emit.constant(0)
        return emit.call(f"llvm.masked.load.v{emit.lanes}f32.p0", *arguments, result=emit.vector(FLOAT32))

    def store(self, vector: Value, pointer: Value, offset: int) -> None:
        """Stores elements at this position."""
        emit, own = self._emit, self._spot(pointer, offset)
        if self._valid is None:
            emit.store(vector, own, FLOAT32)
        else:
            arguments = vector, own, INT32(4), self._mask
            emit.call(f"llvm.masked.store.v{emit.lanes}f32.p0", *arguments, result=ir.VoidType())

    def where_valid(self, vector: Value) -> Value:
        """Sets lanes past the end of the leaf to zero."""
        return (
            vector
            if self._valid is None
            else self._emit.builder.select(self._mask, vector, self._emit.constant(0))
        )

    @property
    def _mask(self) -> Value:
        assert self._valid is not None
        return ir.Constant(ir.VectorType(ir.IntType(1), self._emit.lanes), list(map(int, self._valid)))

    def _spot(self, pointer: Value, offset: int) -> Value:
        return self._emit.at(self._emit.at(pointer, offset, FLOAT), self._first, FLOAT)


def _vectors(emit: Emitter, leaf: _FlatLeaf, number: Value, programs: int) -> Iterator[_LeafVector]:
    """Yields the vectors of a leaf that one program computes, in a loop. The last program gets the rest."""
    builder, lanes = emit.builder, emit.lanes
    vectors, rest = divmod(leaf.count, lanes)
    if vectors:
        bound = lambda n: builder.udiv(builder.mul(n, emit.integer(vectors)), emit.integer(programs))
        first, end = bound(number), bound(builder.add(number, emit.integer(1)))
        with builder.if_then(builder.icmp_unsigned("<", first, end)), emit.loop(end, first=first) as n:
            yield _LeafVector(emit, builder.mul(n, emit.integer(lanes)))
    if rest:
        with builder.if_then(builder.icmp_unsigned("==", number, emit.integer(programs - 1))):
            yield _LeafVector(emit, emit.integer(vectors * lanes), rest)
