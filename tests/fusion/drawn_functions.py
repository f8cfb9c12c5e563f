"""Functions of numbers that drawn programs compute, most of which round; see `drawn_operations`.

Operations that round stand at the root of an output. Their arguments lie where a function is well conditioned, so
that a result that differs by more than rounding is a mistake.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from drawn_operations import ANY, Draw, finite, held, ordered
from drawn_programs import Part, of_values, operation
from drawn_types import FLOATS, Type
from jax.ad_checkpoint import checkpoint_name

lax = jax.lax

FOUR = Type("float32", (4,))
LENGTHS = ("float32", "float32", "float16", "bfloat16")

# --- of one number ------------------------------------------------------------------------------------------


def _near(x: jax.Array) -> jax.Array:
    return held(x, 8) / 2


def _far(x: jax.Array) -> jax.Array:
    return held(x, 50) / 2


def _inside(x: jax.Array) -> jax.Array:
    return held(x, 8) / 16


def _above(x: jax.Array) -> jax.Array:
    return jnp.abs(held(x, 50)) + 1


OF_ONE: dict[str, tuple[Callable, Callable]] = {
    **{name: (_far, getattr(jnp, name)) for name in ("sin", "cos", "tan")},
    **{name: (_inside, getattr(jnp, name)) for name in ("arcsin", "arccos", "arctanh")},
    **{name: (_near, getattr(jnp, name)) for name in ("arctan", "arcsinh", "sinh", "cosh", "tanh", "expm1")},
    **{name: (_near, getattr(lax, name)) for name in ("exp", "exp2", "erf", "erfc", "logistic")},
    **{name: (_above, getattr(jnp, name)) for name in ("arccosh", "log", "log2", "log1p", "sqrt")},
    "rsqrt": (_above, lax.rsqrt),
    "cbrt": (_far, jnp.cbrt),
    "erf_inv": (_inside, lax.erf_inv),
}

for name, (domain, function) in OF_ONE.items():
    operation(f"of one {name}", lambda rng, own: ((rng.randrange(4),), [Part(FOUR)]), kind="rounded")(
        lambda params, own, x, d=domain, f=function: f(d(x().astype(LENGTHS[params[0]])))
    )

# --- of two -------------------------------------------------------------------------------------------------

OF_TWO: dict[str, Callable] = {
    "power": lambda x, y: jnp.power(_above(x), _near(finite(y, 4))),
    "power of whole numbers": lambda x, y: lax.pow(_above(held(x, 8)), jnp.clip(y, -3, 3).astype(jnp.int32)),
    "angle": lambda x, y: jnp.arctan2(ordered(finite(x)), ordered(finite(y))),
    "sum of powers": lambda x, y: jnp.logaddexp(_near(x), _near(y)),
    "quotient": lambda x, y: held(x) / (jnp.abs(held(y)) + 3),
    "inverse square": lambda x, y: lax.integer_pow(_above(x) - y * 0, -2),
    "polynomial": lambda x, y: jnp.polyval(finite(x, 4), finite(y, 2)),
    "rest": lambda x, y: lax.rem(_far(x), _above(y) / 8),
}
for name, function in OF_TWO.items():
    operation(f"of two {name}", lambda rng, own: ((), [Part(FOUR), Part(FOUR)]), kind="rounded")(
        lambda params, own, x, y, f=function: f(x(), y())
    )

# --- gradients ----------------------------------------------------------------------------------------------


def _walked(x: jax.Array, y: jax.Array) -> jax.Array:
    """The last of numbers that follow from each other."""
    return lax.scan(lambda carry, own: (carry * 2 + own[0] * own[1], None), x[0], (x, y))[0]


DIFFERENTIATED: dict[str, Callable] = {
    "product": lambda x, y: x * y * x,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "absolute": lambda x, y: jnp.abs(x) * y,
    "sort": lambda x, y: jnp.sort(x) * y,
    "greatest": lambda x, y: jnp.max(x) * y,
    "running": lambda x, y: lax.cumsum(x, reverse=True) * y,
    "running product": lambda x, y: lax.cumprod(x + 5) * y,
    "all": lambda x, y: jnp.prod(x + 5) + y,
    "read": lambda x, y: x[jnp.clip(y, 0, 3).astype(jnp.int32)] * y,
    "written": lambda x, y: x.at[jnp.clip(y[0], 0, 3).astype(jnp.int32)].set(x[1] * 3) * y,
    "chosen": lambda x, y: jnp.where(x > y, x * 3, y * x),
    "clamped": lambda x, y: jnp.clip(x, -1.5, 2.5) * y,
    "walk": _walked,
    "tanh": lambda x, y: jnp.tanh(x / 4) * y,
    "logistic": lambda x, y: jax.nn.sigmoid(x / 2) * y,
    "softmax": lambda x, y: jax.nn.softmax(x) * y,
    "logsumexp": lambda x, y: jax.nn.logsumexp(x) + y,
    "length": lambda x, y: jnp.sqrt(jnp.sum(x * x) + 1) * y,
    "branch": lambda x, y: lax.cond(y[0] > 0, lambda v: v * v, lambda v: v * 5, x) * y,
    "padded": lambda x, y: lax.pad(x, jnp.float32(0), [(1, -1, 0)]) * y,
    "matrix": lambda x, y: jnp.outer(x, y) @ x,
}


def _gradient(params: tuple, own: Type, x: Callable, y: Callable) -> Any:
    total = lambda *both: jnp.sum(DIFFERENTIATED[params[0]](*both))
    # Halves lie between what `y` can be, where extremes have one derivative.
    at, by = held(finite(x(), 7) + 0.5, 7), finite(y(), 7)
    return jax.grad(total, 1 if params[1] else 0)(at, by)


for name in DIFFERENTIATED:
    operation(
        f"gradient {name}",
        lambda rng, own, name=name: ((name, rng.random() < 0.3), [Part(FOUR), Part(FOUR)]),
        kind="rounded",
    )(_gradient)

# --- exact --------------------------------------------------------------------------------------------------

SMALL = {"bfloat16": 2}


def _raised(rng: Draw, wanted: Type) -> Any:
    return ((f"to the {rng.randrange(6)}",), [Part(wanted)]) if wanted.dtype in ANY else None


of_values(
    "power",
    _raised,
    lambda params, own, x: lax.integer_pow(finite(x, SMALL.get(own.dtype, 4)), int(params[0][-1])),
    weight=0.5,
)
of_values(
    "is finite",
    lambda rng, own: ((), [Part(Type(rng.choice(FLOATS), own.shape))]) if own.dtype == "bool" else None,
    lambda params, own, x: jnp.isfinite(x),
)

NEIGHBOURS = {"int32": ("float32",), "int16": ("float16", "bfloat16")}


def _next(rng: Draw, wanted: Type) -> Any:
    if wanted.dtype not in NEIGHBOURS:
        return None
    own = Type(rng.choice(NEIGHBOURS[wanted.dtype]), wanted.shape)
    return (), [Part(own), Part(own)]


def _neighbour(params: tuple, own: Type, x: jax.Array, y: jax.Array) -> jax.Array:
    """The bits of the next number; of a NaN, and of what is next to zero, one."""
    found = jnp.nextafter(lax.select(x == 0, lax.full_like(x, 1), x), y)
    return lax.bitcast_convert_type(lax.select(found != found, lax.full_like(x, 1), found), own.dtype)


of_values("neighbour", _next, _neighbour, weight=0.5)
of_values(
    "share",
    lambda rng, own: ((), [Part(own), Part(Type("bool", own.shape))]) if own.dtype == "float32" else None,
    lambda params, own, x, c: held(x) * 4 / jnp.where(c, jnp.float32(1), jnp.float32(2)),
)
of_values(
    "in a call",
    lambda rng, own: ((rng.choice(("jit", "barrier", "named")),), [Part(own)]) if own.dtype in ANY else None,
    lambda params, own, x: {
        "jit": jax.jit(lambda v: held(v) + 1),
        "barrier": lambda v: lax.optimization_barrier(held(v)) + 2,
        "named": lambda v: checkpoint_name(held(v), "kept") + 3,
    }[params[0]](x),
    weight=0.5,
)
