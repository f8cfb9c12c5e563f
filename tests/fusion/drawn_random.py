"""Random numbers, linear algebra and smooth functions of vectors of drawn programs; see `drawn_operations`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from drawn_operations import Draw, finite, held, with_rank
from drawn_programs import Part, of_values, operation
from drawn_types import NUMBERS, UNSIGNED, Type

lax = jax.lax

INDEX = Type("int32")

# --- random numbers -----------------------------------------------------------------------------------------

KEY = Part(Type("key"))


def drawn(name: str, draw: Callable, run: Callable, *, weight: float = 1.0) -> None:
    of_values(name, draw, run, kind="random", weight=weight)


def of_key(dtypes: tuple[str, ...], *more: Type) -> Callable:
    return lambda rng, own: ((), [KEY, *map(Part, more)]) if own.dtype in dtypes and 40 not in own.shape else None


drawn("bits", of_key(UNSIGNED), lambda params, own, key: jax.random.bits(key, own.shape, own.dtype))
drawn(
    "randint of a type",
    of_key(("int8", "int16", "uint8", "int32", "uint32"), INDEX),
    lambda params, own, key, n: jax.random.randint(key, own.shape, 2, n & 63, own.dtype),
)
drawn(
    "rademacher",
    of_key(("int8", "int32")),
    lambda params, own, key: jax.random.rademacher(key, own.shape, own.dtype),
)
drawn(
    "choice without replacement",
    with_rank(1, NUMBERS, lambda rng, own: ((), [KEY, Part(Type(own.dtype, (max(4, own.shape[0]),)))])),
    lambda params, own, key, x: jax.random.choice(key, x, own.shape, replace=False),
)
drawn(
    "rows in another order",
    with_rank(2, NUMBERS, lambda rng, own: ((rng.random() < 0.5,), [KEY, Part(own)])),
    lambda params, own, key, x: jax.random.permutation(key, x, independent=params[0]),
)
drawn(
    "words of a key",
    lambda rng, own: ((), [KEY]) if own == Type("uint32", (2,)) else None,
    lambda params, own, key: jax.random.key_data(key),
)
drawn(
    "key",
    lambda rng, own: (
        ((rng.choice(("seed", "words")),), [Part(INDEX), Part(Type("uint32", (2,)))])
        if own.dtype == "key"
        else None
    ),
    lambda params, own, n, words: jax.random.key(n) if params[0] == "seed" else jax.random.wrap_key_data(words),
)
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


def _turned(x: jax.Array) -> jax.Array:
    """Regular matrices whose rows have to be exchanged."""
    return jnp.roll(_regular(x), 1, -2)


def _one_side(x: jax.Array, y: jax.Array, **how: bool) -> jax.Array:
    """A triangular system whose diagonal is one where it says so, and is not read."""
    matrix = finite(x, 1) / 4 + 2 * jnp.eye(3, dtype=x.dtype)
    side = jnp.broadcast_to(finite(y, 4), (3, 3))
    return lax.linalg.triangular_solve(matrix, side, **how)


LINEAR = {
    "solve": lambda x, y: jnp.linalg.solve(_turned(x), finite(y)[..., None])[..., 0],
    "inverse": lambda x, y: jnp.linalg.inv(_turned(x)),
    "determinant": lambda x, y: jnp.linalg.det(_turned(x)),
    "cholesky": lambda x, y: jnp.linalg.cholesky(_symmetric(x)),
    "upper cholesky": lambda x, y: jnp.linalg.cholesky(_symmetric(x), upper=True),
    "lower": lambda x, y: _triangular(x, y, True),
    "upper": lambda x, y: _triangular(x, y, False),
    "factors": lambda x, y: lax.linalg.lu(_turned(x))[0],
    "order": lambda x, y: lax.linalg.lu(_turned(x))[2],
    "from the right": lambda x, y: _one_side(x, y, left_side=False, lower=True),
    "transposed": lambda x, y: _one_side(x, y, left_side=True, lower=True, transpose_a=True),
    "unit diagonal": lambda x, y: _one_side(x, y, left_side=True, lower=False, unit_diagonal=True),
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
    "logistic": jax.random.logistic,
    "triangular": lambda key, shape: jax.random.triangular(key, -1.0, 0.5, 2.0, shape),
    "rayleigh": lambda key, shape: jax.random.rayleigh(key, 2.0, shape),
    "pareto": lambda key, shape: jax.random.pareto(key, 3.0, shape),
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
    "cumulative backwards": lambda x: lax.cumlogsumexp(x, reverse=True),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "variance": lambda x: jnp.var(x, keepdims=True),
    "length": lambda x: jnp.linalg.norm(x, keepdims=True),
}.items():
    rounded(
        f"smooth {name}",
        [Part(Type("float32", (4,))), Part(Type("float32", (4, 2)))],
        lambda params, x, y, f=function: jax.vmap(f, 1)(finite(y)) if params[1] else f(finite(x)),
    )
