"""Loss functions for ONE sample. The caller applies `vmap` and takes means over a minibatch."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.algorithms.hyperparameters import Number

# Far beyond every clipping range. Larger ratios would overflow, and their gradients would be 0 * inf.
_MAX_LOG_RATIO = 10.0


def policy_gradient_loss(log_prob: Float[Array, ""], advantage: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the REINFORCE surrogate loss (Williams, 1992). Its gradient is the negated policy gradient."""
    return -log_prob * advantage


def clipped_policy_loss(
    log_ratio: Float[Array, ""], advantage: Float[Array, ""], clip_coef: Number
) -> Float[Array, ""]:
    """Computes the clipped surrogate of PPO (Schulman et al., 2017, equation 7), to be minimised.

    Ratios are bounded at exp(10), so that a policy that has moved far has finite gradients.
    """
    ratio = jnp.exp(jnp.minimum(log_ratio, _MAX_LOG_RATIO))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)


def squared_value_loss(value: Float[Array, ""], target: Float[Array, ""]) -> Float[Array, ""]:
    """Computes half the squared error of a value."""
    return 0.5 * jnp.square(value - target)


def clipped_value_loss(
    value: Float[Array, ""], old_value: Float[Array, ""], target: Float[Array, ""], clip_coef: Number
) -> Float[Array, ""]:
    """Computes the clipped value loss of PPO.

    It is the maximum of two squared errors: of the value, and of the value clipped to a range around the old
    value. See Engstrom et al., "Implementation Matters in Deep Policy Gradients", ICLR 2020.
    """
    clipped = old_value + jnp.clip(value - old_value, -clip_coef, clip_coef)
    return jnp.maximum(squared_value_loss(value, target), squared_value_loss(clipped, target))


def bound_loss(
    mean: Float[Array, "*shape"], low: Float[np.ndarray, "*shape"], high: Float[np.ndarray, "*shape"]
) -> Float[Array, ""]:
    """Computes the sum of squared distances by which the means of actions lie outside their bounds."""
    below, above = jnp.asarray(low, mean.dtype) - mean, mean - jnp.asarray(high, mean.dtype)
    return jnp.sum(jnp.square(jnp.maximum(jnp.maximum(below, above), 0.0)))


def approximate_kl(log_ratio: Float[Array, ""]) -> Float[Array, ""]:
    """Estimates KL(old, new) from one sample as `(r - 1) - log r` (Schulman, "Approximating KL Divergence")."""
    return jnp.expm1(log_ratio) - log_ratio
