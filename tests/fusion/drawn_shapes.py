"""Shapes, windows, long sorts and tables of drawn programs; see `drawn_operations`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_operations import ANY, Draw, finite, ordered, with_rank
from drawn_programs import Part, of_values
from drawn_types import INTEGERS, NUMBERS, Type

lax = jax.lax

INDEX = Type("int32")


def of_rank(rank: int | None, shapes: Callable[..., Any], *more: str, dtypes: tuple[str, ...] = NUMBERS) -> Any:
    """Draws arrays of the wanted type in `shapes(shape)`; with `more`, one of these words as parameter."""
    return with_rank(
        rank,
        dtypes,
        lambda rng, own: (
            (rng.choice(more),) if more else (),
            [Part(Type(own.dtype, tuple(shape))) for shape in shapes(own.shape)],
        ),
    )


# --- elements in other places -------------------------------------------------------------------------------

MOVED: dict[str, tuple[int | None, Callable, Callable]] = {
    "every second": (1, lambda s: [(2 * s[0],)], lambda x: x[1::2]),
    "every second backwards": (1, lambda s: [(2 * s[0],)], lambda x: x[::-2]),
    "columns backwards": (2, lambda s: [s], lambda x: lax.rev(x, (1,))),
    "turned": (2, lambda s: [(s[1], s[0])], jnp.rot90),
    "axes turned": (2, lambda s: [(s[1], 2, s[0])], lambda x: jnp.transpose(x, (2, 0, 1))[:, :, 1]),
    "tiled": (1, lambda s: [(2,)], lambda x: jnp.tile(x, 2)),
    "repeated": (1, lambda s: [(2,)], lambda x: jnp.repeat(x, 2)),
    "middle": (None, lambda s: [(s[0] + 3, *s[1:])], lambda x: jnp.split(x, [1, x.shape[0] - 2])[1]),
    "unstacked": (None, lambda s: [(3, *s)], lambda x: jnp.unstack(x)[1]),
    "of a column": (1, lambda s: [(s[0], 1)], lambda x: jnp.squeeze(x, 1)),
    "lower triangle": (2, lambda s: [s], jnp.tril),
    "upper triangle": (2, lambda s: [s], lambda x: jnp.triu(x, 1)),
    "diagonal": (1, lambda s: [(s[0], s[0])], jnp.diagonal),
    "flat": (1, lambda s: [(2, 3)], jnp.ravel),
}
for name, (rank, shapes, move) in MOVED.items():
    of_values(
        name,
        of_rank(rank, shapes),
        lambda params, own, x, f=move: _fitted(f(x), own.shape),
        weight=0.4,
    )


def _fitted(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of the wanted shape; the flat ones are cut off, or repeated."""
    return x if x.shape == shape else jnp.resize(x, shape)


of_values("folded", of_rank(2, lambda s: [(s[0] * s[1],)]), lambda params, own, x: jnp.reshape(x, own.shape))
of_values(
    "beside",
    of_rank(2, lambda s: [(s[0], 1), (s[0], s[1] - 1)]),
    lambda params, own, x, y: jnp.concatenate([x, y], axis=1),
)
of_values(
    "every pair",
    of_rank(2, lambda s: [(s[0],), (s[1],)], dtypes=ANY),
    lambda params, own, x, y: finite(x)[:, None] - finite(y)[None],
)


def _padding(rng: Draw, own: Type) -> Any:
    size, between, low = rng.choice((2, 3)), rng.choice((0, 1, 2)), rng.choice((-1, 0, 1))
    high = own.shape[0] - (size + (size - 1) * between) - low
    return (low, high, between), [Part(Type(own.dtype, (size,))), Part(Type(own.dtype))]


of_values(
    "pad between",
    with_rank(1, NUMBERS, _padding),
    lambda params, own, x, fill: lax.pad(x, fill, [params]),
)

# --- windows ------------------------------------------------------------------------------------------------

WINDOWS: dict[str, tuple[Callable[[int], int], dict[str, Any]]] = {
    "inside": (lambda n: n + 1, {"padding": ((0, 0),)}),
    "around": (lambda n: n, {"padding": ((1, 0),)}),
    "apart": (lambda n: 2 * n, {"padding": ((0, 0),), "window_strides": (2,)}),
    "with gaps": (lambda n: n + 2, {"padding": ((0, 0),), "window_dilation": (2,)}),
    "spread": (lambda n: n, {"padding": ((1, 0),), "window_strides": (2,), "base_dilation": (2,)}),
}
"""Numbers under windows of two that give so many, and the windows."""

POOLS: dict[str, tuple[Callable, Callable, tuple[str, ...]]] = {
    "sum": (lax.add, lambda dtype: 0, ANY),
    "max": (lax.max, lambda dtype: np.iinfo(dtype).min if dtype in INTEGERS else -np.inf, ANY),
    "min": (lax.min, lambda dtype: np.iinfo(dtype).max if dtype in INTEGERS else np.inf, ANY),
    "own": (lambda a, b: a | b, lambda dtype: 0, INTEGERS),
}


def _pool(params: tuple, own: Type, x: jax.Array, kind: str) -> jax.Array:
    combine, nothing, _ = POOLS[kind]
    numbers = {"window_strides": (1,)} | WINDOWS[params[0]][1]
    clean = finite if kind == "sum" else ordered
    return lax.reduce_window(
        clean(x), x.dtype.type(nothing(own.dtype)), combine, window_dimensions=(2,), **numbers
    )


def _windows(rng: Draw, own: Type) -> Any:
    form = rng.choice(tuple(WINDOWS))
    return (form,), [Part(Type(own.dtype, (WINDOWS[form][0](own.shape[0]),)))]


for kind, (_, _, dtypes) in POOLS.items():
    of_values(
        f"pool {kind}",
        with_rank(1, dtypes, _windows),
        lambda params, own, x, kind=kind: _pool(params, own, x, kind),
        weight=0.4,
    )

CONVOLUTIONS: dict[str, tuple[Callable[[int], int], dict[str, Any]]] = {
    "inside": (lambda n: n + 1, {"window_strides": (1,), "padding": ((0, 0),)}),
    "around": (lambda n: n, {"window_strides": (1,), "padding": ((0, 1),)}),
    "apart": (lambda n: 2 * n, {"window_strides": (2,), "padding": ((0, 0),)}),
    "with gaps": (lambda n: n + 2, {"window_strides": (1,), "padding": ((0, 0),), "rhs_dilation": (2,)}),
    "spread": (lambda n: n, {"window_strides": (2,), "padding": ((1, 0),), "lhs_dilation": (2,)}),
}


def _convolution(rng: Draw, own: Type) -> Any:
    form, shared = rng.choice(tuple(CONVOLUTIONS)), rng.random() < 0.5
    image = Type("float32", (2, CONVOLUTIONS[form][0](own.shape[1])))
    return (form, shared), [Part(image), Part(Type("float32", (own.shape[0], 2)))]


def _convolved(params: tuple, own: Type, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Two channels to as many as the result has rows; weights that all share are known."""
    form, shared = params
    channels = own.shape[0]
    known = jnp.asarray(np.arange(channels * 4).reshape(channels, 2, 2) % 5 - 2, jnp.float32)
    drawn = jnp.stack([finite(weights, 4), jnp.flip(finite(weights, 4))], axis=2)
    return lax.conv_general_dilated(finite(x, 4)[None], known if shared else drawn, **CONVOLUTIONS[form][1])[0]


of_values("convolution", with_rank(2, ("float32",), _convolution), _convolved)

# --- reductions and sorts -----------------------------------------------------------------------------------

of_values(
    "reduce by an own function",
    with_rank(1, INTEGERS, lambda rng, own: ((), [Part(Type(own.dtype, (own.shape[0], 3)))])),
    lambda params, own, x: lax.reduce(x, x.dtype.type(0), lambda a, b: (a ^ b) + x.dtype.type(0), (1,)),
)


def _later(one: Any, other: Any) -> Any:
    """Of two pairs the one that is greater."""
    greater = (one[0] > other[0]) | (one[0] == other[0]) & (one[1] >= other[1])
    return tuple(lax.select(greater, a, b) for a, b in zip(one, other, strict=True))


of_values(
    "reduce two together",
    with_rank(1, INTEGERS, lambda rng, own: ((), [Part(Type(own.dtype, (own.shape[0], 3)))] * 2)),
    lambda params, own, x, y: lax.reduce((x, y), (x.dtype.type(0), y.dtype.type(0)), _later, (1,))[1],
)
of_values(
    "extreme of all",
    lambda rng, own: (
        ((rng.choice(("argmax", "argmin")),), [Part(Type(rng.choice(ANY), (2, 3)))]) if own == INDEX else None
    ),
    lambda params, own, x: getattr(jnp, params[0])(ordered(x)).astype(own.dtype),
)
of_values(
    "reduce a wide row",
    lambda rng, own: (
        ((rng.choice(("sum", "max", "min", "prod")),), [Part(Type("float32", (40,)))])
        if own == Type("float32")
        else None
    ),
    lambda params, own, x: (
        # Whole numbers, whose sum does not depend on the order of its terms.
        getattr(jnp, params[0])(jnp.round(finite(x, 1 if params[0] == "prod" else 50)))
        if params[0] in ("sum", "prod")
        else getattr(jnp, params[0])(ordered(x))
    ),
)
of_values(
    "ask a wide row",
    lambda rng, own: (
        ((rng.choice(("any", "all")),), [Part(Type("float32", (40,))), Part(Type("float32"))])
        if own == Type("bool")
        else None
    ),
    lambda params, own, x, y: getattr(jnp, params[0])(x > y),
)
of_values(
    "product with a known matrix",
    with_rank(1, ("float32",), lambda rng, own: ((), [Part(Type("float32", (40,)))])),
    lambda params, own, x: (
        finite(x, 4) @ jnp.asarray(np.arange(40 * own.shape[0]).reshape(40, -1) % 5 - 2, x.dtype)
    ),
)

FEW = ("bool", "uint8", "int32", "float32")


def _by_two(rng: Draw, own: Type) -> Any:
    first, second = Type(rng.choice(("bool", *FEW)), own.shape), Type(rng.choice(FEW), own.shape)
    return (rng.choice(("of 2", "of 3")), rng.randrange(len(own.shape))), [Part(first), Part(second), Part(own)]


of_values(
    "sort by two",
    with_rank(None, NUMBERS, _by_two),
    lambda params, own, a, b, x: lax.sort(
        (ordered(a), ordered(b), ordered(x)), dimension=params[1], num_keys=int(params[0][-1])
    )[2],
)

LONG = 14
"""Elements beyond the number up to which neighbours are exchanged."""
LONG_SORTS: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "sort": (lambda x: jnp.sort(x), NUMBERS, ()),
    "sort down": (lambda x: jnp.sort(x, descending=True), NUMBERS, ()),
    "order": (lambda x: jnp.argsort(x).astype(jnp.int32), ("int32",), NUMBERS),
    "order down": (lambda x: jnp.argsort(x, descending=True).astype(jnp.int32), ("int32",), NUMBERS),
    "top": (lambda x: lax.top_k(x, 6)[1], ("int32",), ANY),
}


def _long(rng: Draw, own: Type, sources: tuple[str, ...]) -> Any:
    source = rng.choice(sources) if sources else own.dtype
    # Two arrays, and not a longer one that repeats a shorter: some elements are equal, and others are not.
    return (rng.randrange(4),), [Part(Type(source, (4,))), Part(Type(source, (4,))), Part(Type(source, (3,)))]


for name, (sort, dtypes, sources) in LONG_SORTS.items():
    of_values(
        f"long {name}",
        with_rank(1, dtypes, lambda rng, own, sources=sources: _long(rng, own, sources)),
        lambda params, own, x, y, z, f=sort: jnp.roll(f(ordered(jnp.concatenate([x, y, z, x[:3]]))), -params[0])[
            : own.shape[0]
        ],
        weight=0.5,
    )

# --- tables -------------------------------------------------------------------------------------------------

TABLE = np.random.default_rng(1).integers(-4, 100, (12, 3))
"""Numbers that are known, and more of them than are read by selects."""

of_values(
    "table",
    lambda rng, own: (
        ((("clip", "fill", "")[rng.randrange(3)],), [Part(Type(rng.choice(INTEGERS), own.shape)), Part(INDEX)])
        if own.dtype in ("int32", "float32", "int8") and len(own.shape) < 2 and 40 not in own.shape
        else None
    ),
    lambda params, own, n, m: (
        jnp.asarray(TABLE, own.dtype).at[lax.optimization_barrier(n), m].get(mode=params[0] or None)
    ),
    weight=2,
)
of_values(
    "block of a table",
    with_rank(2, ("int32", "float32"), lambda rng, own: ((), [Part(INDEX), Part(INDEX)])),
    lambda params, own, n, m: lax.dynamic_slice(jnp.asarray(np.tile(TABLE, (1, 2)), own.dtype), (n, m), own.shape),
)
