"""Indexing of drawn programs; see `drawn_operations`."""

from typing import Any

import jax
import jax.numpy as jnp
from drawn_operations import ANY, Draw, finite, ordered, with_rank
from drawn_programs import Part, of_values
from drawn_types import INTEGERS, NUMBERS, UNSIGNED, Type

lax = jax.lax

INDEX = Type("int32")

# --- indexing -----------------------------------------------------------------------------------------------

MODES = ("clip", "fill", "")
"""The empty one is the mode of plain indexing."""


def _inside(n: jax.Array) -> jax.Array:
    """An index. XLA takes unsigned ones of half their range or more for negative where it computes them itself."""
    return lax.optimization_barrier(n) if not isinstance(n, slice) and n.dtype.name in UNSIGNED else n


def _got(x: jax.Array, place: Any, mode: str) -> jax.Array:
    place = jax.tree.map(_inside, place)
    return x.at[place].get(mode=mode) if mode else x[place]


def _read(rng: Draw, own: Type) -> Any:
    index = rng.choice((INDEX, INDEX, Type("int8"), Type("uint8"), Type("uint32"), Type("int16")))
    source = Type(own.dtype, (rng.choice((2, 3, 4)), *own.shape))
    return (rng.choice(MODES),), [Part(source), Part(index)]


of_values(
    "read",
    lambda rng, own: _read(rng, own) if len(own.shape) < 2 and own.dtype != "key" else None,
    lambda params, own, x, n: _got(x, n, params[0]),
    weight=3,
)
of_values(
    "read all",
    with_rank(
        1,
        NUMBERS,
        lambda rng, own: (
            (rng.choice(MODES),),
            [Part(Type(own.dtype, (4,))), Part(Type(rng.choice(INTEGERS), own.shape))],
        ),
    ),
    lambda params, own, x, n: _got(x, n, params[0]),
    weight=3,
)
of_values(
    "read cell",
    with_rank(
        0,
        NUMBERS,
        lambda rng, own: ((rng.choice(MODES),), [Part(Type(own.dtype, (2, 3))), Part(INDEX), Part(INDEX)]),
    ),
    lambda params, own, x, n, m: _got(x, (n, m), params[0]),
    weight=2,
)
of_values(
    "read along",
    with_rank(2, NUMBERS, lambda rng, own: ((rng.randrange(2),), [Part(own), Part(Type("int32", own.shape))])),
    lambda params, own, x, n: jnp.take_along_axis(x, n, params[0], mode="clip"),
)
of_values(
    "slice",
    with_rank(
        None,
        NUMBERS,
        lambda rng, own: (
            (),
            [
                Part(Type(own.dtype, (own.shape[0] + 2, *own.shape[1:]))),
                Part(Type(rng.choice(("int32", "uint8", "int8")))),
            ],
        ),
    ),
    lambda params, own, x, n: lax.dynamic_slice(x, (_inside(n), *[n.dtype.type(0)] * (x.ndim - 1)), own.shape),
    weight=3,
)
of_values(
    "wide row",
    lambda rng, own: (
        ((), [Part(Type("float32", (40,))), Part(INDEX)])
        if own in (Type("float32", (4,)), Type("float32", (3,)))
        else None
    ),
    lambda params, own, x, n: lax.dynamic_slice(x, (n,), own.shape),
)
of_values(
    "update",
    with_rank(
        1,
        NUMBERS,
        lambda rng, own: (
            (),
            [
                Part(own),
                Part(Type(own.dtype, (min(2, own.shape[0]),))),
                Part(Type(rng.choice(("int32", "uint8", "int8")))),
            ],
        ),
    ),
    lambda params, own, x, v, n: lax.dynamic_update_slice(x, v, (_inside(n),)),
    weight=2,
)

of_values(
    "read column",
    with_rank(
        1,
        NUMBERS,
        lambda rng, own: ((rng.choice(MODES),), [Part(Type(own.dtype, (own.shape[0], 4))), Part(INDEX)]),
    ),
    lambda params, own, x, n: (
        x.at[:, n].get(mode=params[0]) if params[0] else lax.dynamic_index_in_dim(x, n, 1, keepdims=False)
    ),
)
of_values(
    "read rows",
    with_rank(
        2,
        NUMBERS,
        lambda rng, own: (
            (rng.choice(MODES),),
            [Part(Type(own.dtype, (4, own.shape[1]))), Part(Type(rng.choice(INTEGERS), own.shape[:1]))],
        ),
    ),
    lambda params, own, x, n: _got(x, n, params[0]),
)
of_values(
    "read pairs",
    with_rank(
        1,
        NUMBERS,
        lambda rng, own: (
            (rng.choice(MODES),),
            [Part(Type(own.dtype, (3, 4))), *[Part(Type("int32", own.shape))] * 2],
        ),
    ),
    lambda params, own, x, n, m: _got(x, (n, m), params[0]),
)
of_values(
    "read block",
    with_rank(
        2,
        NUMBERS,
        lambda rng, own: (
            (),
            [Part(Type(own.dtype, (own.shape[0] + 1, own.shape[1] + 2))), Part(INDEX), Part(INDEX)],
        ),
    ),
    lambda params, own, x, n, m: lax.dynamic_slice(x, (n, m), own.shape),
)
of_values(
    "update block",
    with_rank(
        2,
        NUMBERS,
        lambda rng, own: (
            (),
            [Part(own), Part(Type(own.dtype, (own.shape[0] - 1, own.shape[1] - 1))), Part(INDEX), Part(INDEX)],
        ),
    ),
    lambda params, own, x, v, n, m: lax.dynamic_update_slice(x, v, (n, m)),
)

WRITES = ("add", "subtract", "min", "max", "multiply", "set")


def _written(rng: Draw, own: Type) -> Any:
    kinds = WRITES if own.dtype in ANY else ("set",)
    index = Type(rng.choice(("int32", "int32", "int8", "uint32")))
    mode = rng.choice(("drop", "clip"))
    return (rng.choice(kinds), mode), [Part(own), Part(Type(own.dtype, own.shape[1:])), Part(index)]


def _write(x: jax.Array, place: Any, kind: str, mode: str, value: jax.Array) -> jax.Array:
    clean = {"set": lambda v: v, "multiply": lambda v: finite(v, 4)}.get(kind, finite)
    return getattr(clean(x).at[jax.tree.map(_inside, place)], kind)(clean(value), mode=mode)


of_values(
    "write",
    with_rank(None, NUMBERS, _written),
    lambda params, own, x, v, n: _write(x, n, *params, v),
    weight=3,
)
of_values(
    "write all",
    with_rank(
        1,
        NUMBERS,
        lambda rng, own: (
            _written(rng, own)
            and (
                (rng.choice(WRITES if own.dtype in ANY else ("set",)), rng.choice(("drop", "clip"))),
                [Part(own), Part(Type(own.dtype)), Part(Type("int32", (3,)))],
            )
        ),
    ),
    # Several writes to one place are of one value.
    lambda params, own, x, v, n: _write(x, n, *params, v),
    weight=2,
)
of_values(
    "write cell",
    with_rank(
        2,
        NUMBERS,
        lambda rng, own: (
            _written(rng, own)
            and (
                (rng.choice(WRITES if own.dtype in ANY else ("set",)), rng.choice(("drop", "clip"))),
                [Part(own), Part(Type(own.dtype)), Part(INDEX), Part(INDEX)],
            )
        ),
    ),
    lambda params, own, x, v, n, m: _write(x, (n, m), *params, v),
    weight=2,
)
of_values(
    "write each",
    with_rank(
        1,
        ANY,
        lambda rng, own: (
            (rng.choice(WRITES[:-1]), rng.choice(("drop", "clip"))),
            [Part(own), Part(Type(own.dtype, (3,))), Part(Type(rng.choice(("int32", "uint8")), (3,)))],
        ),
    ),
    lambda params, own, x, v, n: _write(finite(x, 4), n, *params, finite(v, 2 if own.dtype == "bfloat16" else 4)),
)
of_values(
    "write column",
    with_rank(
        2,
        NUMBERS,
        lambda rng, own: (
            (rng.choice(WRITES if own.dtype in ANY else ("set",)), rng.choice(("drop", "clip"))),
            [Part(own), Part(Type(own.dtype, own.shape[:1])), Part(INDEX)],
        ),
    ),
    lambda params, own, x, v, n: _write(x, (slice(None), n), *params, v),
)
SEGMENTS = {
    "max": lambda x, n, count: jax.ops.segment_max(ordered(x), n, count),
    "min": lambda x, n, count: jax.ops.segment_min(ordered(x), n, count),
    "prod": lambda x, n, count: jax.ops.segment_prod(finite(x, 2), n, count),
}
of_values(
    "segments by",
    with_rank(
        1,
        ANY,
        lambda rng, own: (
            (rng.choice(tuple(SEGMENTS)),),
            [Part(Type(own.dtype, (4,))), Part(Type("int32", (4,)))],
        ),
    ),
    lambda params, own, x, n: SEGMENTS[params[0]](x, n, own.shape[0]),
)
