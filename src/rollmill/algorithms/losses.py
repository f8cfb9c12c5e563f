"""Losses of ONE sample; means over a minibatch are taken where they are lifted."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def policy_gradient_loss(log_prob: Float[Array, ""], advantage: Float[Array, ""]) -> Float[Array, ""]:
    """Whose slope is the policy gradient (Williams, "REINFORCE", 1992), negated, to be minimised."""
    return -log_prob * advantage


def clipped_policy_loss(
    log_ratio: Float[Array, ""], advantage: Float[Array, ""], clip_coef: float
) -> Float[Array, ""]:
    """PPO's clipped surrogate (Schulman et al., 2017, equation 7), to be minimised."""
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)


def squared_value_loss(value: Float[Array, ""], target: Float[Array, ""]) -> Float[Array, ""]:
    """Half of the squared error."""
    return 0.5 * jnp.square(value - target)


def clipped_value_loss(
    value: Float[Array, ""], old_value: Float[Array, ""], target: Float[Array, ""], clip_coef: float
) -> Float[Array, ""]:
    """Half of the larger squared error of the value and of the value kept near the old one.

    As in OpenAI's baselines; see Engstrom et al., "Implementation Matters in Deep Policy Gradients",
    ICLR 2020.
    """
    kept_near = old_value + jnp.clip(value - old_value, -clip_coef, clip_coef)
    return jnp.maximum(squared_value_loss(value, target), squared_value_loss(kept_near, target))


def approximate_kl(log_ratio: Float[Array, ""]) -> Float[Array, ""]:
    """Of the old policy from the new, `(r - 1) - log r` (Schulman, "Approximating KL Divergence", 2020)."""
    return jnp.expm1(log_ratio) - log_ratio
