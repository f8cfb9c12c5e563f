"""Indexing, random numbers and linear algebra of drawn programs; see `drawn_operations`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from drawn_operations import ANY, Draw, finite, held, with_rank
from drawn_programs import INTEGERS, NUMBERS, UNSIGNED, Part, Type, of_values, operation

lax = jax.lax

INDEX = Type("int32")

# --- indexing -----------------------------------------------------------------------------------------------

MODES = ("clip", "fill", "")
"""The empty one is the mode of plain indexing."""


def _inside(n: jax.Array) -> jax.Array:
    """An index; unsigned ones of half their range or more, which XLA takes for negative where they are known."""
    return jnp.minimum(n, n.dtype.type(100)) if n.dtype.name in UNSIGNED else n


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

WRITES = ("add", "min", "max", "multiply", "set")


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

# --- random numbers -----------------------------------------------------------------------------------------

KEY = Part(Type("key"))


def drawn(name: str, draw: Callable, run: Callable, *, weight: float = 1.0) -> None:
    of_values(name, draw, run, kind="random", weight=weight)


def of_key(dtypes: tuple[str, ...], *more: Type) -> Callable:
    return lambda rng, own: ((), [KEY, *map(Part, more)]) if own.dtype in dtypes and 40 not in own.shape else None


drawn("bits", of_key(UNSIGNED), lambda params, own, key: jax.random.bits(key, own.shape, own.dtype))
drawn(
    "randint",
    of_key(("int32",), INDEX),
    lambda params, own, key, n: jax.random.randint(key, own.shape, -3, n & 15),
)
drawn("uniform", of_key(("float32",)), lambda params, own, key: jnp.floor(jax.random.uniform(key, own.shape) * 8))
drawn("bernoulli", of_key(("bool",)), lambda params, own, key: jax.random.bernoulli(key, 0.25, own.shape))
drawn(
    "permutation",
    with_rank(1, NUMBERS, lambda rng, own: ((), [KEY, Part(own)])),
    lambda params, own, key, x: jax.random.permutation(key, x),
)
drawn(
    "categorical",
    lambda rng, own: ((), [KEY, Part(Type("float32", (4,)))]) if own == INDEX else None,
    lambda params, own, key, x: jax.random.categorical(key, finite(x)),
)
drawn(
    "choice",
    lambda rng, own: ((), [KEY, Part(Type(own.dtype, (4,)))]) if not own.shape and own.dtype in NUMBERS else None,
    lambda params, own, key, x: jax.random.choice(key, x),
)
of_values(
    "fold",
    lambda rng, own: ((), [KEY, Part(Type(rng.choice(("int32", "uint8"))))]) if own.dtype == "key" else None,
    lambda params, own, key, n: jax.random.fold_in(key, n),
    kind="random",
)
of_values(
    "split",
    lambda rng, own: ((rng.randrange(3),), [KEY]) if own.dtype == "key" else None,
    lambda params, own, key: jax.random.split(key, 3)[params[0]],
    kind="random",
)

# --- what rounds --------------------------------------------------------------------------------------------

MATRICES = Type("float32", (2, 3, 3))
SIDES = Type("float32", (2, 3))


def _regular(x: jax.Array) -> jax.Array:
    """Matrices far from singular."""
    return finite(x, 4) + 16 * jnp.eye(3, dtype=x.dtype)


def _symmetric(x: jax.Array) -> jax.Array:
    return _regular(x + x.swapaxes(-1, -2)) + 16 * jnp.eye(3, dtype=x.dtype)


def _each(function: Callable, axis: int) -> Callable:
    """Of a stack of matrices along an axis."""
    return lambda x, *more: jax.vmap(function, (axis, *[0] * len(more)))(jnp.moveaxis(x, 0, axis), *more)


def _triangular(x: jax.Array, y: jax.Array, lower: bool) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(_regular(x), finite(y), lower=lower)


LINEAR = {
    "solve": lambda x, y: jnp.linalg.solve(_regular(x), finite(y)[..., None])[..., 0],
    "inverse": lambda x, y: jnp.linalg.inv(_regular(x)),
    "determinant": lambda x, y: jnp.linalg.det(_regular(x)),
    "cholesky": lambda x, y: jnp.linalg.cholesky(_symmetric(x)),
    "lower": lambda x, y: _triangular(x, y, True),
    "upper": lambda x, y: _triangular(x, y, False),
}


def rounded(name: str, parts: list[Part], run: Callable) -> None:
    """Registers what stands at the root of an output; the results are arrays of float32 of any shape."""
    operation(name, lambda rng, own: (rng_params(rng), parts), kind="rounded")(
        lambda params, own, *own_parts: run(params, *(part() for part in own_parts))
    )


def rng_params(rng: Draw) -> tuple:
    return rng.randrange(3), rng.random() < 0.5


for name, function in LINEAR.items():
    rounded(
        f"linear {name}",
        [Part(MATRICES), Part(SIDES)],
        lambda params, x, y, f=function: _each(f, params[0])(x, y) if params[1] else f(x[0], y[0]),
    )
for name, function in {
    "normal": jax.random.normal,
    "exponential": jax.random.exponential,
    "gumbel": jax.random.gumbel,
    "laplace": jax.random.laplace,
    "truncated": lambda key, shape: jax.random.truncated_normal(key, -1.0, 2.0, shape),
    "between": lambda key, shape: jax.random.uniform(key, shape, minval=-3.0, maxval=5.0),
}.items():
    rounded(
        f"random {name}",
        [KEY],
        lambda params, key, f=function: (
            jax.vmap(lambda k: f(k, (2,)))(jax.random.split(key, 3)) if params[1] else f(key, (3,))
        ),
    )
for name, function in {
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "normalise": lambda x: (x - x.mean()) / (x.std() + 1),
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(held(x, 4)),
    "root": lambda x: jnp.sqrt(jnp.abs(x)),
    "quotient": lambda x: x / (jnp.abs(jnp.flip(x)) + 1),
    "cumulative": lambda x: lax.cumlogsumexp(x),
}.items():
    rounded(
        f"smooth {name}",
        [Part(Type("float32", (4,))), Part(Type("float32", (4, 2)))],
        lambda params, x, y, f=function: jax.vmap(f, 1)(finite(y)) if params[1] else f(finite(x)),
    )
