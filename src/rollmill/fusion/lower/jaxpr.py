"""Lowers a jaxpr equation by equation, with the rule of each primitive.

Equations that do not depend on the environment create no nodes: constants are folded, and uniform values become
part of the prologue.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from rollmill.core.errors import CannotFuse
from rollmill.core.types import is_key
from rollmill.core.user_frame import user_frame_of
from rollmill.fusion.lower.context import Lowering, fold_constant
from rollmill.fusion.lower.rule import Equation
from rollmill.fusion.lower.rules import RULES, calls, products, shapes
from rollmill.fusion.lower.values import Const, LoweringError, Value, is_shared, is_traced, shared_array

TYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32")
"""Names of the dtypes that kernels support."""

EXACT_TYPES = set(map(np.dtype, ("bool", "int32", "uint32", "float32")))
EXACT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
"""NumPy functions with the same results as JAX primitives, bit for bit."""

MAX_NODES = 100_000
"""Maximum number of nodes of a program, including those that turn out not to be needed."""

JAX = str(Path(jax.__file__).parent)

KEEP_PRODUCTS = {*calls.INLINED, "transpose", "add_any", "cond"}
"""Primitives that accept outer products of vectors that are not expanded."""

ADVICE = {
    "pure_callback": "a kernel cannot call Python. Write this part with jax.numpy.",
    "io_callback": "a kernel cannot call Python. Return the values in `info` instead.",
    "debug_callback": "a kernel cannot print or call Python. Remove debugging code to fuse this program.",
    "debug_print": "a kernel cannot print. Remove debugging code to fuse this program.",
    "conv_general_dilated": "convolutions are faster as separate kernels.",
    "custom_vmap_call": (
        "a kernel steps each environment separately, but in some libraries (brax:, playground:) environments "
        "share their resets. With reset_ratio=1 (--env-option reset_ratio=1) each environment resets separately."
    ),
    "advance_in_warp": "a kernel cannot call MuJoCo Warp. With physics=jax, a kernel can compute the task.",
    "cross": "a fragment of another group cannot be part of a kernel.",
}


def lower_jaxpr(
    closed: core.ClosedJaxpr | core.Jaxpr,
    values: Sequence[Value],
    ctx: Lowering,
    needed: Sequence[bool] | None = None,
    *,
    keeps_products: bool = False,
) -> list[Value]:
    """Lowers a jaxpr for these arguments, and returns its results.

    Only the results in `needed` are computed, by default all. With `keeps_products`, results may remain outer
    products instead of being expanded. Raises `CannotFuse` if a needed primitive has no rule, and a
    `LoweringError` if an outer product is too large to expand.
    """
    jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
    consts = closed.consts if isinstance(closed, core.ClosedJaxpr) else []
    needed = [True] * len(jaxpr.outvars) if needed is None else list(needed)
    known: dict[core.Var, Value] = dict(zip(jaxpr.constvars, map(shared_array, consts), strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))

    def value_of(atom: Any) -> Value:
        return Const(np.asarray(atom.val, _struct(atom).dtype)) if isinstance(atom, core.Literal) else known[atom]

    wanted = [atom for atom, need in zip(jaxpr.outvars, needed, strict=True) if need]
    for equation, outputs in _live(jaxpr, wanted):
        results = _results(equation, outputs, [value_of(atom) for atom in equation.invars], ctx)
        known.update(zip(equation.outvars, results, strict=True))
        # Checked while nodes are created, because an unrolled loop could otherwise exhaust memory.
        if ctx.region.size > MAX_NODES:
            too_long = f"a program of more than {MAX_NODES} operations is too long."
            raise CannotFuse(too_long, user_frame_of(equation))
    pairs = zip(jaxpr.outvars, needed, strict=True)
    results = [value_of(atom) if need else calls.UNNEEDED for atom, need in pairs]
    return results if keeps_products else [products.expand_outer_products(ctx, value) for value in results]


def _struct(atom: Any) -> Any:
    """Returns the shape and type of an atom of a jaxpr."""
    return atom.aval


def _live(jaxpr: core.Jaxpr, wanted: Sequence[Any]) -> list[tuple[core.JaxprEqn, tuple[bool, ...]]]:
    """Equations that something wanted depends on, or that have effects, and which of their results are read."""
    read_later = {atom for atom in wanted if not isinstance(atom, core.Literal)}
    live = []
    # Backwards, so that one pass suffices: an equation is live if a later live equation reads its results.
    for equation in reversed(jaxpr.eqns):
        outputs = tuple(var in read_later for var in equation.outvars)
        if any(outputs) or equation.effects:
            read_later.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
            live.append((equation, outputs))
    return live[::-1]


def _results(
    equation: core.JaxprEqn, needed: tuple[bool, ...], values: list[Value], ctx: Lowering
) -> Sequence[Value]:
    name = equation.primitive.name
    try:
        # Calls are entered even if all operands are shared, because some results may be constant and others
        # uniform.
        alike = name not in calls.RULES and all(map(is_shared, values))
        if equation.effects and (alike or name not in RULES):
            raise LoweringError("kernels do not support side effects")
        if alike and not _is_moved(name, values):
            return _beside(equation, values, ctx)
        outputs = tuple(map(_struct, equation.outvars))
        if name not in calls.RULES:
            _check_types(outputs)
        if name not in RULES:
            raise LoweringError("kernels do not support this primitive")
        operands = [_operand(ctx, name, value) for value in values]
        results = RULES[name](ctx, Equation(name, _plain_params(equation), outputs, needed), operands)
        return [fold_constant(value) for value in results]
    except LoweringError as error:
        raise CannotFuse(
            f"{name} cannot be fused: {error}.", user_frame_of(equation), ADVICE.get(name, "")
        ) from error
    except CannotFuse as error:
        # If the line belongs to a JAX function with a jaxpr of its own, the line of its caller is more useful.
        if not error.line.startswith(JAX):
            raise
        # the line that called the JAX function
        raise CannotFuse(error.reason, user_frame_of(equation), error.advice) from error


def _operand(ctx: Lowering, name: str, value: Value) -> Value:
    """Returns a value as the rule of a primitive takes it."""
    return value if name in KEEP_PRODUCTS else products.expand_outer_products(ctx, value)


def _plain_params(equation: core.JaxprEqn) -> dict[str, Any]:
    """Returns an equation's parameters, with NumPy integers converted."""
    return {name: _plain(value) for name, value in equation.params.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.integer):
        return int(value)
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _check_types(outputs: Sequence[Any]) -> None:
    for aval in outputs:
        if not is_key(aval.dtype) and aval.dtype.name not in TYPES:
            raise LoweringError(
                f"kernels do not support numbers of type {aval.dtype.name}, only {', '.join(TYPES)}"
            )


def _is_moved(name: str, values: Sequence[Value]) -> bool:
    """Returns whether shared arrays are only looked at from another side, which NumPy does here."""
    if name not in shapes.MOVES and name not in ("split", "unstack", "iota"):
        return False
    return all(map(shapes.is_moved_here, values))


def _by_numpy(equation: core.JaxprEqn, arrays: Sequence[Any]) -> np.ndarray | None:
    """Evaluates an equation of constants by NumPy if XLA certainly gives the same result. Otherwise returns None.

    XLA would compile a program for each kind of operands.
    """
    avals: list[Any] = [var.aval for var in equation.outvars]
    (result, *others), name = avals, equation.primitive.name
    if jnp.issubdtype(result.dtype, jax.dtypes.extended):  # typed random keys
        return None
    dtypes = [np.dtype(result.dtype), *(getattr(array, "dtype", None) for array in arrays)]
    if others or any(map(is_traced, arrays)) or not all(dtype in EXACT_TYPES for dtype in dtypes):
        return None
    with np.errstate(all="ignore"):
        if name == "convert_element_type" and (dtypes[1] != np.float32 or dtypes[0] == np.float32):
            computed = np.asarray(arrays[0]).astype(dtypes[0])
        elif name in EXACT:
            computed = np.asarray(EXACT[name](*arrays))
        else:
            return None
    is_plain = computed.dtype == dtypes[0] and computed.shape == result.shape
    return computed if is_plain and all(map(_is_portable, (*arrays, computed))) else None


def _is_portable(array: Any) -> bool:
    """Returns whether no number is subnormal, which XLA may round to zero, or a NaN, which has several forms."""
    if array.dtype != np.float32:
        return True
    sizes = np.abs(array)
    return bool(np.all((sizes == 0) | (sizes >= np.finfo(np.float32).tiny)))


def _beside(equation: core.JaxprEqn, values: Sequence[Value], ctx: Lowering) -> Sequence[Value]:
    """Results of an equation whose operands all environments share: constants, or a part of the prologue."""
    arrays = [ctx.array(value) for value in values]
    if (known := _by_numpy(equation, arrays)) is not None:
        return [shared_array(known)]
    params = equation.primitive.get_bind_params(equation.params)
    bind = lambda: equation.primitive.bind(*arrays, **params)
    # If all arrays are constant, the result is computed now, so that later equations can be folded.
    if any(map(is_traced, arrays)):
        results = bind()
    else:
        with jax.ensure_compile_time_eval():
            results = bind()
    return [shared_array(x) for x in (results if equation.primitive.multiple_results else [results])]
