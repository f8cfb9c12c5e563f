"""Losses of one sample, in every regime, by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.algorithms.losses import (
    approximate_kl,
    clipped_policy_loss,
    clipped_value_loss,
    squared_value_loss,
)

CLIP = 0.2


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # The slope is with respect to the log-ratio, -ratio x advantage where it is not cut off.
        (1.0, 3.0, -3.0, -3.0),
        (1.1, 3.0, -3.3, -3.3),
        (1.5, 3.0, -3.6, 0.0),  # good, and likelier than before: no more to gain
        (0.5, 3.0, -1.5, -1.5),  # good, and made unlikely: pulled back
        (1.0, -3.0, 3.0, 3.0),
        (0.9, -3.0, 2.7, 2.7),
        (0.5, -3.0, 2.4, 0.0),  # bad, and less likely than before: no more to gain
        (1.5, -3.0, 4.5, 4.5),  # bad, and made likely: pulled back
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss(ratio, advantage, loss, slope):
    function = lambda log_ratio: clipped_policy_loss(log_ratio, jnp.float32(advantage), CLIP)
    found, found_slope = eqx.filter_jit(jax.value_and_grad(function))(jnp.log(jnp.float32(ratio)))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(found_slope, slope, rtol=1e-5)


@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_a_ratio_that_would_overflow_has_a_finite_loss_and_slope(advantage):
    function = lambda log_ratio: clipped_policy_loss(log_ratio, jnp.float32(advantage), CLIP)
    found, slope = jax.value_and_grad(function)(jnp.float32(1e4))
    assert np.isfinite(found) and slope == 0.0


def test_squared_value_loss():
    found, slope = jax.value_and_grad(squared_value_loss)(jnp.float32(3.0), jnp.float32(5.0))
    assert (found, slope) == (2.0, -2.0)


@pytest.mark.parametrize(
    ("value", "old_value", "target", "loss", "slope"),
    [
        (1.125, 1.0, 2.0, 0.5 * 0.875**2, -0.875),  # near the old value: not clipped
        (1.5, 1.0, 2.0, 0.5 * 0.75**2, 0.0),  # moved far towards the target: no more to gain
        (3.5, 1.0, 2.0, 0.5 * 1.5**2, 1.5),  # shot past the target, farther than the clipped value: pulled back
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),  # moved away from the target: pulled back
        (0.5, 1.0, 0.0, 0.5 * 0.75**2, 0.0),  # the same downwards
        (1.5, 1.0, 0.0, 0.5 * 1.5**2, 1.5),
    ],
)
def test_clipped_value_loss(value, old_value, target, loss, slope):
    function = lambda v: clipped_value_loss(v, jnp.float32(old_value), jnp.float32(target), 0.25)
    found = eqx.filter_jit(jax.value_and_grad(function))(jnp.float32(value))
    np.testing.assert_allclose(found, (loss, slope), rtol=1e-6)


def test_clipping_never_lowers_the_value_loss():
    value, old_value, target = jax.random.normal(jax.random.key(0), (3, 1000))
    plain = np.asarray(jax.vmap(squared_value_loss)(value, target))
    clipped = np.asarray(jax.vmap(lambda *a: clipped_value_loss(*a, CLIP))(value, old_value, target))
    assert np.all(clipped >= plain) and np.any(clipped > 2 * plain)
    inside = np.abs(np.asarray(value - old_value)) < CLIP
    np.testing.assert_allclose(clipped[inside], plain[inside], rtol=1e-4, atol=1e-6)


def test_approximate_kl_by_value():
    np.testing.assert_allclose(approximate_kl(jnp.log(jnp.float32(2.0))), 1 - np.log(2), rtol=1e-6)
    np.testing.assert_allclose(approximate_kl(jnp.log(jnp.float32(0.5))), -0.5 + np.log(2), rtol=1e-6)
    assert approximate_kl(jnp.float32(0.0)) == 0


def test_approximate_kl_is_never_negative_and_precise_near_zero():
    """Near zero it is half of the square; `exp(x) - 1 - x` would round to zero or below."""
    log_ratio = jnp.concatenate([jnp.linspace(-5, 5, 101), 10.0 ** -jnp.arange(1.0, 6.0)])
    found = np.asarray(jax.vmap(approximate_kl)(log_ratio))
    assert np.all(found >= 0)
    exact = np.expm1(np.float64(log_ratio)) - np.float64(log_ratio)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-8)


def test_approximate_kl_is_the_divergence_on_average():
    """Over actions drawn from the old policy, `E[r - 1 - log r] = KL(old, new)`."""
    old, new = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.25, 0.25])
    each = jax.vmap(approximate_kl)(jnp.asarray(np.log(new / old), jnp.float32))
    np.testing.assert_allclose(old @ np.asarray(each), np.sum(old * np.log(old / new)), rtol=1e-5)
