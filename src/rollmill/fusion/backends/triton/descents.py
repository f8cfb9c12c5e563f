"""Makes an optimiser step in one GPU kernel: the norm of all gradients, clipping, moments and weights.

XLA launches a kernel for each sum and several kernels that depend on the sums, and launching takes most of the
time.

Shape letters: `S` weights of the network, `G` elements of the gradients' vector.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float

from rollmill.core.errors import CannotFuse
from rollmill.core.operations import UPDATE_KERNEL
from rollmill.fusion.backends.triton.codegen import TritonWriter
from rollmill.fusion.backends.triton.compile import Kernel, call, call_in_lanes, entry
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Program
from rollmill.fusion.kernels.descents import Descended, DescentPrograms, descent_programs
from rollmill.fusion.opt.schedule import schedule_of

MAX_NUMBERS = 2**17
"""Numbers of a network up to which each program of the kernel sums the squares of all gradients itself.

Half a megabyte, which all programs read from the second cache. Gradient kernels of larger networks do not fit into
shared memory.
"""
BLOCK, SUMMED, NUM_WARPS = 256, 4_096, 8
"""Numbers that a program steps, and that it sums at a time."""


def descend_by_kernel(
    operands: Sequence[Array],
    program: core.ClosedJaxpr,
    count: int,
    gradients: Float[Array, " G"] | None = None,
    *,
    lanes: int = 1,
) -> Descended | None:
    """Computes an optimiser step with a kernel, for a network that is a single vector. Returns None if no kernel
    supports the step.

    Args:
        operands: weights, gradients and state.
        program: maps gradients and state to the step and the next state.
        count: the number of leaves of the weights.
        gradients: a vector that begins with the gradients. It is read instead of the gradients in `operands`.
        lanes: number of runs that are computed at once, inside `jax.vmap`.
    """
    weights, state = operands[0], operands[2:]
    if count != 1 or weights.ndim != 1 or not 0 < weights.size <= MAX_NUMBERS:
        return None
    programs = descent_programs(program)
    if programs is None:
        return None
    jaxpr = programs.plan.program
    known = dict(zip(jaxpr.invars[1:], state, strict=True))
    flat, single = ([known[atom] for atom in atoms] for atoms in (programs.flat, programs.single))
    kernel = descent_kernel(programs, weights.size)
    arrays = [operands[1] if gradients is None else gradients, weights, *flat, *single]
    try:
        squares, moved, *changed = (call if lanes == 1 else call_in_lanes)(kernel, arrays)
    except CannotFuse:
        return None
    known |= dict(zip((*programs.changed_flat, *programs.changed_single), changed, strict=True))
    after = [
        jnp.asarray(atom.val) if isinstance(atom, core.Literal) else known[atom] for atom in jaxpr.outvars[1:]
    ]
    return Descended([moved, *after], squares)


def descent_kernel(programs: DescentPrograms, size: int) -> Kernel:
    """Returns the kernel of an optimiser step for `size` weights.

    Its arrays are gradients, weights, the vectors of the state, and its single variables. Its outputs are the sum
    of squares, the weights, and the changed parts of the state. Weights and vectors are changed in place.
    """
    vector, number = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    singles = [jax.ShapeDtypeStruct((), atom.aval.dtype) for atom in programs.changed_single]
    changed = [*(vector for _ in programs.changed_flat), *singles]
    return Kernel(
        _source(programs),
        -(-size // BLOCK),
        (number, vector, *changed),
        {"S": size, "BLOCK": BLOCK, "SUMMED": SUMMED},
        NUM_WARPS,
        uniforms=len(programs.single),
        aliases=_aliases(programs),
    )


def _aliases(programs: DescentPrograms) -> dict[int, int]:
    """Returns the arrays that are changed in place, with the outputs that they become."""
    jaxpr = programs.plan.program
    before = dict(zip(jaxpr.outvars[1:], jaxpr.invars[1:], strict=True))
    if any(node.op == "input" and node.attributes[0] for node in programs.sums.nodes()):
        return {1: 1}  # a program could sum over elements that another program has already changed
    pairs = [(before[atom], n) for n, atom in enumerate(programs.changed_flat)]
    return {1: 1} | {2 + programs.flat.index(atom): 2 + n for atom, n in pairs if atom in programs.flat}


def _source(programs: DescentPrograms) -> str:
    """Returns the source of `sums`, which sums over all elements, and of `kernel`, which steps one block."""
    flat = [f"flat{n}" for n in range(len(programs.flat))]
    single = [f"single{n}" for n in range(len(programs.single))]
    after = [f"after{n}" for n in range(len(programs.changed_flat))]
    single_after = [f"single_after{n}" for n in range(len(programs.changed_single))]
    totals = [f"total{n}" for n in range(len(programs.sums.outputs))]
    loads = [f"{name}_here = tl.load({name} + at, mask=here, other=0.0)" for name in ("gradients", *flat)]
    adding, added = _written(programs.sums, [f"{name}_here" for name in ("gradients", *flat)], indent=2)
    sums = [
        "@triton.jit",
        f"def sums({', '.join(['gradients', *flat])}, S: tl.constexpr, BLOCK: tl.constexpr):",
        *(f"    {name} = tl.zeros([BLOCK], tl.float32)" for name in totals),
        "    for first in tl.static_range(0, S, BLOCK):",
        "        at = first + tl.arange(0, BLOCK)",
        "        here = at < S",
        *(f"        {line}" for line in loads),
        *adding,
        *(f"        {name} += tl.where(here, {value}, 0.0)" for name, value in zip(totals, added, strict=True)),
        f"    return {', '.join(f'tl.sum({name}, axis=0)' for name in totals)}",
    ]
    whole = [f"tl.full([BLOCK], {name}, tl.float32)" for name in totals[:-1]]
    types = [TYPES[atom.aval.dtype.name] for atom in programs.single]
    whole += [f"tl.full([BLOCK], tl.load({name}), {kind})" for name, kind in zip(single, types, strict=True)]
    given = [f"{name}_here" for name in ("gradients", "weights", *flat)] + [f"whole{n}" for n in range(len(whole))]
    stepping, (moved, *changed) = _written(programs.step, given, indent=1)
    results = dict(zip([*after, *single_after], changed, strict=True))
    pointers = ["gradients", "weights", *flat, *single, "squares", "moved", *after, *single_after]
    kernel = [
        "@triton.jit",
        f"def {UPDATE_KERNEL}({', '.join(pointers)}, S: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr):",
        f"    {', '.join(totals)} = sums({', '.join(['gradients', *flat])}, S, SUMMED)",
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "    here = at < S",
        "    is_first = at == 0",
        *(f"    {line}" for line in loads),
        "    weights_here = tl.load(weights + at, mask=here, other=0.0)",
        *(f"    whole{n} = {text}" for n, text in enumerate(whole)),
        *stepping,
        f"    tl.store(moved + at, {moved}, mask=here)",
        *(f"    tl.store({name} + at, {results[name]}, mask=here)" for name in after),
        *(f"    tl.store({name} + at * 0, {results[name]}, mask=is_first)" for name in single_after),
        f"    tl.store(squares + at * 0, tl.full([BLOCK], {totals[-1]}, tl.float32), mask=is_first)",
    ]
    return "\n".join([*sums, "", "", *kernel, "", entry(UPDATE_KERNEL)])


def _written(program: Program, inputs: Sequence[str], *, indent: int) -> tuple[list[str], list[str]]:
    """Returns the lines of a program for one block of elements, and the names of its outputs."""
    source = KernelSource("float32", (), indent=indent)
    outputs = TritonWriter(source).write(schedule_of(program), inputs)
    hoisted = ["    " * (indent - 1) + line for line in source.before.lines]
    return [*hoisted, *source.lines], outputs
