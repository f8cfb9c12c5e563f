"""What drawn programs compute; importing this module registers the operations.

Signs of zeros, which XLA's own programs do not agree on, are never looked at, and minima of bfloat16 see no NaN:
docs/numbers.md lists such exceptions.
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_programs import Part, of_values
from drawn_types import FLOATS, HELD, INTEGERS, NUMBERS, SIGNED, UNSIGNED, Type

lax = jax.lax

Draw = random.Random


def held(x: jax.Array, most: float | None = None) -> jax.Array:
    """Numbers on which arithmetic is exact, or NaN; integers as they are."""
    name = x.dtype.name
    if name not in FLOATS:
        return x
    limit = np.asarray(most or HELD[name], x.dtype)
    return lax.clamp(-limit, x, limit)


def finite(x: jax.Array, most: float | None = None) -> jax.Array:
    """Numbers on which arithmetic is exact; NaN is zero."""
    return held(lax.select(x != x, lax.full_like(x, 0), x), most) if x.dtype.name in FLOATS else x


def ordered(x: jax.Array) -> jax.Array:
    """Numbers whose zeros are positive; those of bfloat16 are no NaN."""
    if x.dtype.name not in FLOATS:
        return x
    x = lax.select(x == 0, lax.full_like(x, 0), x)
    return finite(x) if x.dtype.name == "bfloat16" else x


def alike(count: int, dtypes: tuple[str, ...], other: str | None = None) -> Any:
    """Draws operands of the wanted type; with `other`, of one of these types instead."""

    def draw(rng: Draw, wanted: Type) -> Any:
        return ((), [Part(wanted)] * count) if wanted.dtype in dtypes else None

    return draw


def with_rank(rank: int | None, dtypes: tuple[str, ...], parts: Any) -> Any:
    """Draws what `parts(rng, wanted)` says, for arrays with so many axes; None for one at least."""

    def draw(rng: Draw, wanted: Type) -> Any:
        fits = len(wanted.shape) == rank if rank is not None else wanted.shape
        return parts(rng, wanted) if fits and wanted.dtype in dtypes and 40 not in wanted.shape else None

    return draw


# --- leaves -------------------------------------------------------------------------------------------------

NEVER = lambda rng, wanted: None


def _constant(params: tuple, own: Type) -> Any:
    if own.dtype == "key":
        return jax.random.key(params[0])
    return jnp.asarray(np.asarray(params, object).reshape(own.shape).astype(jnp.dtype(own.dtype)))


of_values("constant", NEVER, _constant, kind="leaf")


def _fit(params: tuple, own: Type, x: jax.Array) -> jax.Array:
    """An array in another shape: numbers are left out at the end, or repeated from the beginning."""
    size = int(np.prod(own.shape))
    flat = lax.reshape(x, (x.size,))
    repeated = lax.concatenate([flat] * -(-size // x.size), 0) if size > x.size else flat
    return lax.reshape(lax.slice(repeated, (0,), (size,)), own.shape)


of_values("fit", NEVER, _fit, kind="leaf")

# --- element by element -------------------------------------------------------------------------------------


@jax.custom_jvp
def with_own_derivative(x: jax.Array) -> jax.Array:
    """A function with a derivative of its own."""
    return jnp.where(x > 0, x, -x)


with_own_derivative.defjvp(lambda primals, tangents: (with_own_derivative(*primals), tangents[0]))


@jax.custom_vjp
def with_own_gradient(x: jax.Array) -> jax.Array:
    """A function with a gradient of its own."""
    return jnp.maximum(ordered(x), 1)


with_own_gradient.defvjp(lambda x: (with_own_gradient(x), None), lambda rest, g: (g,))

ANY = (*FLOATS, *INTEGERS)

OF_ONE = {
    "neg": (ANY, lambda x: -x),
    "abs": ((*FLOATS, *SIGNED), jnp.abs),
    "sign": (ANY, jnp.sign),
    "half": (FLOATS, lambda x: jnp.floor(held(x, 40) / 2)),
    "square": (ANY, lambda x: jnp.square(held(x))),
    "cube": (("float32", *INTEGERS), lambda x: lax.integer_pow(held(x), 3)),
    "round": (FLOATS, lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "away": (FLOATS, lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)),
    "ceil": (FLOATS, jnp.ceil),
    "shorter": (("float32",), lambda x: lax.reduce_precision(x, 5, 10)),
    "relu": (ANY, lambda x: jax.nn.relu(ordered(x))),
    "own derivative": (ANY, with_own_derivative),
    "own gradient": (ANY, with_own_gradient),
    "remembered": (ANY, lambda x: jax.checkpoint(lambda v: held(v) - 1)(x)),
    "numbers": (FLOATS, lambda x: jnp.nan_to_num(x, nan=3, posinf=7, neginf=-7)),
    "not": ((*INTEGERS, "bool"), lambda x: ~x),
    "popcount": (INTEGERS, lax.population_count),
    "clz": (INTEGERS, lambda x: lax.clz(lax.optimization_barrier(x))),  # known ones are a fault of XLA's
    "clamp": (ANY, lambda x: lax.clamp(x.dtype.type(1), x, x.dtype.type(3))),
}
ZEROS_NAMED = False
"""Whether quotients by the integer zero are selected, as for XLA, and not left to the division: see `quotient`."""


def quotient(divide: Callable, by_zero: Callable) -> Callable:
    """Returns an integer division that names its results by zero to XLA.

    XLA's code for CPUs takes a number divided by itself for 1 from jaxlib 0.11 on, even where it is zero. Equal
    operands come about in many ways, such as by equal loops, and a barrier between them is gone by then.
    """

    def divided(x: jax.Array, y: jax.Array) -> jax.Array:
        if not ZEROS_NAMED:
            return divide(x, y)
        one = lax.full_like(y, 1)
        return lax.select(y == 0, by_zero(x), divide(x, lax.select(y == 0, one, y)))

    return divided


def all_bits(x: jax.Array) -> jax.Array:
    """Returns numbers of which all bits are set."""
    return ~lax.full_like(x, 0)


def floor_by_zero(x: jax.Array) -> jax.Array:
    """Returns the quotients of numbers by zero that `//` gives: -2 of signed numbers with a rest."""
    return all_bits(x) - (x != 0).astype(x.dtype) if x.dtype.name in SIGNED else all_bits(x)


OF_TWO = {
    "add": (ANY, lambda x, y: held(x) + held(y)),
    "sub": (ANY, lambda x, y: held(x) - held(y)),
    "mul": (ANY, lambda x, y: finite(x) * finite(y)),
    "max": (ANY, lambda x, y: jnp.maximum(ordered(x), ordered(y))),
    "min": (ANY, lambda x, y: jnp.minimum(ordered(x), ordered(y))),
    "div": (INTEGERS, quotient(lax.div, all_bits)),
    "rem": (ANY, lambda x, y: lax.rem(held(x), held(y))),
    "floordiv": (INTEGERS, quotient(jnp.floor_divide, floor_by_zero)),
    "mod": (INTEGERS, lambda x, y: x % y),
    "and": ((*INTEGERS, "bool"), jnp.bitwise_and),
    "or": ((*INTEGERS, "bool"), jnp.bitwise_or),
    "xor": ((*INTEGERS, "bool"), jnp.bitwise_xor),
    "shl": (INTEGERS, lax.shift_left),
    "shr": (INTEGERS, lax.shift_right_logical),
    "sar": (INTEGERS, lax.shift_right_arithmetic),
    "bounds": (ANY, lambda x, y: jnp.clip(x, min=-3 if x.dtype.name not in UNSIGNED else 1, max=ordered(y))),
}
for name, (dtypes, function) in OF_ONE.items():
    of_values(name, alike(1, dtypes), lambda params, own, x, f=function: f(x), weight=0.5)
for name, (dtypes, function) in OF_TWO.items():
    of_values(name, alike(2, dtypes), lambda params, own, x, y, f=function: f(x, y), weight=0.8)


def _compared(rng: Draw, wanted: Type) -> Any:
    own = Type(rng.choice(NUMBERS), wanted.shape)
    return (
        ((rng.choice(("eq", "ne", "lt", "le", "gt", "ge")),), [Part(own)] * 2) if wanted.dtype == "bool" else None
    )


of_values("compare", _compared, lambda params, own, x, y: getattr(lax, params[0])(x, y), weight=6)


def _converted(rng: Draw, wanted: Type) -> Any:
    if wanted.dtype == "key":
        return None
    before = rng.choice([own for own in NUMBERS if own != wanted.dtype])
    return (before,), [Part(Type(before, wanted.shape))]


of_values("convert", _converted, lambda params, own, x: x.astype(own.dtype), weight=2)


def _bits(rng: Draw, wanted: Type) -> Any:
    if wanted.dtype not in INTEGERS:
        return None
    size = np.dtype(wanted.dtype).itemsize
    before = rng.choice([own for own in ANY if jnp.dtype(own).itemsize == size])
    return (before,), [Part(Type(before, wanted.shape))]


def _cast(params: tuple, own: Type, x: jax.Array) -> jax.Array:
    x = ordered(jnp.nan_to_num(x)) if x.dtype.name in FLOATS else x
    return lax.bitcast_convert_type(x, own.dtype)


of_values("bitcast", _bits, _cast)

of_values(
    "where",
    lambda rng, wanted: ((), [Part(Type("bool", wanted.shape)), Part(wanted), Part(wanted)]),
    lambda params, own, c, x, y: jnp.where(c, x, y) if own.dtype == "key" else lax.select(c, x, y),
)
of_values(
    "select",
    lambda rng, wanted: ((), [Part(Type("bool")), Part(wanted), Part(wanted)]) if wanted.dtype != "key" else None,
    lambda params, own, c, x, y: lax.select_n(c, x, y),
)
of_values(
    "select of three",
    lambda rng, wanted: ((), [Part(Type("int32", rng.choice([wanted.shape, ()]))), *[Part(wanted)] * 3]),
    lambda params, own, n, x, y, z: lax.select_n(n % 3, x, y, z),
)
of_values(
    "clamp by numbers",
    lambda rng, wanted: ((), [Part(Type(wanted.dtype)), Part(wanted)]) if wanted.dtype in ANY else None,
    lambda params, own, low, x: lax.clamp(ordered(low), ordered(x), jnp.maximum(ordered(low), low.dtype.type(3))),
)

# --- shapes -------------------------------------------------------------------------------------------------


def _reduction(kinds: tuple[str, ...], dtypes: tuple[str, ...]) -> Any:
    def draw(rng: Draw, wanted: Type) -> Any:
        if wanted.dtype not in dtypes or len(wanted.shape) > 1:
            return None
        axis = rng.randint(0, len(wanted.shape))
        shape = (*wanted.shape[:axis], rng.choice((2, 3, 4)), *wanted.shape[axis:])
        return (rng.choice(kinds), axis), [Part(Type(wanted.dtype, shape))]

    return draw


def _reduced(params: tuple, own: Type, x: jax.Array) -> jax.Array:
    kind, axis = params
    functions = {
        "sum": lambda x: jnp.sum(held(x), axis, dtype=x.dtype),
        "prod": lambda x: jnp.prod(finite(x, 4), axis, dtype=x.dtype),
        "max": lambda x: jnp.max(ordered(x), axis),
        "min": lambda x: jnp.min(ordered(x), axis),
        "or": lambda x: lax.reduce_or(x, (axis,)),
        "and": lambda x: lax.reduce_and(x, (axis,)),
        "xor": lambda x: lax.reduce_xor(x, (axis,)),
    }
    return functions[kind](x)


of_values("reduce", _reduction(("sum", "prod", "max", "min"), ANY), _reduced, weight=4)
of_values("reduce bits", _reduction(("or", "and", "xor"), (*INTEGERS, "bool")), _reduced, weight=3)


def _place_of_extreme(rng: Draw, wanted: Type) -> Any:
    drawn = _reduction(("argmax", "argmin"), ("int32", "uint8"))(rng, wanted)
    return drawn and (drawn[0], [Part(Type(rng.choice(NUMBERS), drawn[1][0].type.shape))])


of_values(
    "place of extreme",
    _place_of_extreme,
    lambda params, own, x: getattr(lax, params[0])(ordered(x), params[1], own.dtype),
    weight=2,
)


def _axis(rng: Draw, wanted: Type) -> Any:
    return (rng.randrange(len(wanted.shape)), rng.random() < 0.5), [Part(wanted)]


RUNNING = {
    "cumsum": (ANY, lambda x, axis, back: lax.cumsum(finite(x), axis, back)),
    "cumprod": (("float32", *INTEGERS), lambda x, axis, back: lax.cumprod(finite(x, 4), axis, back)),
    "cummax": (ANY, lambda x, axis, back: lax.cummax(ordered(x), axis, back)),
    "cummin": (ANY, lambda x, axis, back: lax.cummin(ordered(x), axis, back)),
    "associative scan": (ANY, lambda x, axis, back: lax.associative_scan(jnp.add, finite(x), back, axis=axis)),
    "sort": (NUMBERS, lambda x, axis, back: jnp.sort(ordered(x), axis=axis, descending=back)),
    "flip": (NUMBERS, lambda x, axis, back: jnp.flip(x, axis)),
    "roll": (NUMBERS, lambda x, axis, back: jnp.roll(x, 1 if back else -2, axis)),
    "pad": (NUMBERS, lambda x, axis, back: _padded(x, axis, back)),
}


def _padded(x: jax.Array, axis: int, back: bool) -> jax.Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (1, -1, 0) if back else (-1, 1, 0)
    return lax.pad(x, x.dtype.type(1), config)


for name, (dtypes, function) in RUNNING.items():
    of_values(
        name,
        with_rank(None, dtypes, _axis),
        lambda params, own, x, f=function: f(x, *params),
        weight=1.5 if name in ("sort", "associative scan") else 0.7,
    )


def _argsorted(rng: Draw, wanted: Type) -> Any:
    own = Type(rng.choice(NUMBERS), wanted.shape)
    return (rng.randrange(len(wanted.shape)), rng.random() < 0.5), [Part(own)]


of_values(
    "argsort",
    with_rank(None, ("int32",), _argsorted),
    lambda params, own, x: jnp.argsort(ordered(x), params[0], descending=params[1]),
    weight=4,
)
of_values(
    "sort by another",
    with_rank(
        None,
        NUMBERS,
        lambda rng, own: (
            (rng.randrange(len(own.shape)),),
            [Part(Type(rng.choice(NUMBERS), own.shape)), Part(own)],
        ),
    ),
    lambda params, own, keys, x: lax.sort((ordered(keys), x), dimension=params[0], num_keys=1)[1],
)


def of_one_nan(x: jax.Array) -> jax.Array:
    """Returns numbers without signs of NaN, by which XLA orders in `top_k` (docs/numbers.md)."""
    return lax.select(x != x, lax.full_like(x, np.nan), x) if x.dtype.name in FLOATS else x


of_values(
    "top",
    with_rank(1, ANY, lambda rng, own: ((), [Part(Type(own.dtype, (own.shape[0] + 1,)))])),
    lambda params, own, x: lax.top_k(of_one_nan(ordered(x)), own.shape[0])[0],
)
of_values(
    "places of top",
    with_rank(1, ("int32",), lambda rng, own: ((), [Part(Type(rng.choice(ANY), (own.shape[0] + 1,)))])),
    lambda params, own, x: lax.top_k(of_one_nan(ordered(x)), own.shape[0])[1],
    weight=2,
)
of_values(
    "searchsorted",
    with_rank(
        1,
        ("int32",),
        lambda rng, own: (
            (rng.choice(("left", "right")),),
            [Part(Type("int32", (4,))), Part(Type("int32", own.shape))],
        ),
    ),
    lambda params, own, x, v: jnp.searchsorted(jnp.sort(x), v, side=params[0]).astype(jnp.int32),
    weight=2,
)
of_values(
    "segments",
    with_rank(1, ANY, lambda rng, own: ((), [Part(Type(own.dtype, (4,))), Part(Type("int32", (4,)))])),
    lambda params, own, x, n: jax.ops.segment_sum(finite(x), n, own.shape[0]),
)
of_values(
    "concatenate",
    with_rank(
        1, NUMBERS, lambda rng, own: ((), [Part(Type(own.dtype)), Part(Type(own.dtype, (own.shape[0] - 1,)))])
    ),
    lambda params, own, x, y: jnp.concatenate([x[None], y]),
)
of_values(
    "stack",
    with_rank(2, NUMBERS, lambda rng, own: ((), [Part(Type(own.dtype, own.shape[1:]))] * own.shape[0])),
    lambda params, own, *rows: jnp.stack(rows),
)
of_values(
    "transpose",
    with_rank(2, NUMBERS, lambda rng, own: ((), [Part(Type(own.dtype, own.shape[::-1]))])),
    lambda params, own, x: x.T,
)
of_values(
    "columns",
    with_rank(1, NUMBERS, lambda rng, own: ((rng.randrange(2),), [Part(Type(own.dtype, (own.shape[0], 2)))])),
    lambda params, own, x: x[:, params[0]],
)
of_values(
    "iota",
    with_rank(None, INTEGERS, lambda rng, own: ((rng.randrange(len(own.shape)),), [])),
    lambda params, own: lax.broadcasted_iota(own.dtype, own.shape, params[0]),
    weight=0.3,
)
of_values(
    "one hot",
    with_rank(1, FLOATS, lambda rng, own: ((), [Part(Type("int32"))])),
    lambda params, own, n: jax.nn.one_hot(n, own.shape[0], dtype=own.dtype),
)

# --- products -----------------------------------------------------------------------------------------------


def _product(rng: Draw, wanted: Type) -> Any:
    if wanted.dtype not in ANY or 40 in wanted.shape:
        return None
    match wanted.shape:
        case ():
            form, shapes = "i,i->", ((3,), (3,))
        case (n,):
            form, shapes = rng.choice([("ij,j->i", ((n, 3), (3,))), ("ij,ji->i", ((n, 2), (2, n)))])
        case (m, n):
            form, shapes = rng.choice([("ij,jk->ik", ((m, 2), (2, n))), ("i,k->ik", ((m,), (n,)))])
        case _:
            return None
    return (form,), [Part(Type(wanted.dtype, shape)) for shape in shapes]


of_values(
    "product",
    _product,
    lambda params, own, x, y: jnp.einsum(params[0], finite(x, 4), finite(y, 4), preferred_element_type=own.dtype),
    weight=2,
)
