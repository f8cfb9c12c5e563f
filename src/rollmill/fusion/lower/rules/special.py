"""Lowers special functions, and random draws that use them, with the expansions that XLA uses.

JAX traces these functions again, so that a draw by rejection accepts the same values as in JAX.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import random_gamma_p
from jaxtyping import Array, Float

from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.random import check_threefry
from rollmill.fusion.lower.values import Value

LANCZOS = 7.0
FIRST, *COEFFICIENTS = (
    0.99999999999980993227684700473478,
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)
"""The approximation of the gamma function by Lanczos, with the coefficients of XLA."""

FEW_DRAWS = 4
"""Maximum number of draws from a gamma distribution that are computed side by side. More are computed in a
loop."""


def log_gamma(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the logarithm of the gamma function's absolute value, computed in the same order as by XLA."""
    below = x < 0.5
    z = jnp.where(below, -x, x - 1)
    series, offset = _lanczos(z), LANCZOS + 0.5
    log_t = math.log(offset) + jnp.log1p(z / offset)
    above_half = (z + 0.5 - (z + offset) / log_t) * log_t + math.log(math.sqrt(2 * math.pi)) + jnp.log(series)
    size = jnp.abs(x)
    part = size - jnp.floor(size)
    part = jnp.where(part > 0.5, 1 - part, part)
    log_sine = jnp.log(jnp.sin(math.pi * part))
    reflected = jnp.where(jnp.isfinite(log_sine), math.log(math.pi) - log_sine - above_half, -log_sine)
    return jnp.where(jnp.isinf(x), jnp.inf, jnp.where(below, reflected, above_half))


def _lanczos(z: Float[Array, "..."]) -> Float[Array, "..."]:
    series = jnp.full_like(z, FIRST)
    for n, coefficient in enumerate(COEFFICIENTS):
        series = series + coefficient / (z + n + 1)
    return series


def _in_float32(function: Callable[[Array], Array]) -> Rule:
    """Returns the rule of a function of one array, which is computed in float32 whatever its type."""

    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        wide = lambda x: function(x.astype(jnp.float32)).astype(equation.dtype)
        return _trace_anew(ctx, wide, values)

    return rule


def _random_gamma(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    keys, alphas = values
    check_threefry(keys.dtype)
    few = int(np.prod(alphas.shape)) <= FEW_DRAWS
    return _trace_anew(ctx, partial(random_gamma_p.impl, **equation.params, use_vmap=few), values)


def _trace_anew(ctx: Lowering, function: Callable[..., Array], values: Sequence[Value]) -> list[Value]:
    structs: list[Any] = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    return list(ctx.read(jax.make_jaxpr(function)(*structs), values, ctx))


RULES: dict[str, Rule] = {"lgamma": _in_float32(log_gamma), "random_gamma": _random_gamma}
