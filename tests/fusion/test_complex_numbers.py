"""Complex numbers in a function become pairs of floats, whatever is computed of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_runs import both
from jax import lax

from rollmill.fusion import CannotFuse, lower_function

POINTS = np.array([[0.5, -1.0], [-0.3, 0.2], [2.0, 1.5], [-1.0, -0.25]], np.float32)


def arithmetic(x):
    z = lax.complex(x[0], x[1])
    w = 0.7 - 0.4j - z
    return [z * w, z / w, z**3, z**-2, abs(z), z == w, z != w, jnp.conj(z), jnp.where(x[0] > 0, z, w), z.real + 1j]


def functions(x):
    z = lax.complex(x[0], x[1])
    names = ("exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sign", "square", "angle")
    return [*(getattr(jnp, name)(z) for name in names), lax.rsqrt(z), z ** (0.5 + 0.1j)]


def arrays(x):
    z = jnp.stack([lax.complex(x[0], x[1]), 1j * x[0], lax.complex(x[1], x[0]), jnp.complex64(2 - 1j)])
    grid = jnp.outer(z, jnp.conj(z))
    placed = z.at[1].set(3j).at[2].add(1 + 1j)
    spectrum = jnp.fft.fft(z)
    waves = jnp.fft.rfft(jnp.concatenate([x, x * x, x + 1]))
    return [grid @ z, grid.T[1:, ::2], placed, jnp.cumsum(z), z.sum(), spectrum, jnp.fft.ifft(spectrum * z), waves]


def loops(x):
    z = lax.complex(x[0], x[1])
    turn = lambda now, angle: (now * jnp.exp(1j * angle), jnp.abs(now) * now)
    last, each = lax.scan(turn, z, jnp.arange(3) * 0.5)
    grown = lax.while_loop(lambda now: jnp.abs(now) < 4, lambda now: now * 1.5 + 0.1j, z)
    chosen = lax.cond(x[0] > 0, lambda now: now * 2, lambda now: jnp.conj(now) / 3, z)
    return [last, each, grown, chosen, jax.jit(lambda now: now - 1j)(z)]


def indices(x):
    z = jnp.stack([lax.complex(x[0], x[1]), 1j * x[0], lax.complex(x[1], x[0])])
    at = jnp.stack([(x[0] * 2).astype(jnp.int32), jnp.int32(7)])
    gather = lambda **how: z.at[at].get(**how)
    default = gather(mode="fill")
    return [
        z[at],
        gather(mode="fill", fill_value=2 - 3j),
        jnp.isnan(default.real),
        default.imag,
        gather(mode="clip"),
    ]


def in_floats(function):
    """The real and imaginary parts of what a function returns, with complex numbers only inside."""
    parts = lambda value: (jnp.real(value), jnp.imag(value)) if jnp.iscomplexobj(value) else value
    return lambda x: [parts(value) for value in function(x)]


@pytest.mark.parametrize("function", [arithmetic, functions, arrays, loops, indices])
def test_results_are_those_of_complex_numbers(function):
    with jax.numpy_dtype_promotion("standard"):
        found, expected = both(in_floats(function), [jnp.asarray(POINTS)])
    close = lambda mine, right: np.testing.assert_allclose(mine, right, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, found, expected)


def test_tangents_of_large_arguments_are_finite():
    points = np.array([[90, 1], [-90, 1], [1e4, -2], [15, 0.5]], np.float32)

    def tangents(x):
        z = lax.complex(x[0], x[1])
        return [jnp.tanh(z), jnp.tan(1j * z), jnp.tanh(1j * z)]

    with jax.numpy_dtype_promotion("standard"):
        found, _ = both(in_floats(tangents), [jnp.asarray(points)])
    z = points[:, 0].astype(np.float64) + 1j * points[:, 1]
    for (real, imag), exact in zip(found, [np.tanh(z), 1j * np.tanh(z), np.tanh(1j * z)], strict=True):
        np.testing.assert_allclose(np.asarray(real) + 1j * np.asarray(imag), exact, rtol=1e-5, atol=1e-6)


def test_an_inverse_transform_of_real_numbers():
    signal = lambda x: jnp.fft.irfft(jnp.fft.rfft(jnp.tile(x, 3)) * jnp.arange(4, dtype=jnp.complex64))
    found, expected = both(signal, [jnp.asarray(POINTS)])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_what_has_no_rule_is_named():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(
        CannotFuse, match="asin cannot be fused: kernels do not support this function of complex numbers"
    ):
        lower_function(lambda x: jnp.arcsin(lax.complex(x[0], x[1])).real, (shape,))
