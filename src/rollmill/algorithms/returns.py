"""Advantages and returns, for ONE environment; `vmap` lifts them.

Shape letter: `T` steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Advantages(NamedTuple):
    """What the policy (`advantage`) and the critic (`target`) learn from."""

    advantage: Float[Array, " T"]
    target: Float[Array, " T"]


def bootstrap_values(
    value: Float[Array, " T"],
    last_value: Float[Array, ""],
    final_value: Float[Array, " T"],
    terminated: Bool[Array, " T"],
    truncated: Bool[Array, " T"],
) -> Float[Array, " T"]:
    """The value that follows each step: `V(s_{t+1})`, or what stands for it where an episode ends.

    Nothing follows a termination. A truncation is followed by the value of the final observation,
    not of the one that auto-reset put in its place (Pardo et al., "Time Limits in Reinforcement
    Learning", ICML 2018).

    Args:
        value: `V(s_t)`.
        last_value: `V(s_T)`, where the rollout was cut.
        final_value: value of the observation that each step led to before any reset; read only
            where `truncated`.
        terminated: the episode ended at this step by its task.
        truncated: the episode was cut at this step.
    """
    following = jnp.concatenate([value[1:], last_value[None]])
    following = jnp.where(truncated, final_value, following)
    return jnp.where(terminated, 0.0, following)


def generalised_advantages(
    reward: Float[Array, " T"],
    value: Float[Array, " T"],
    next_value: Float[Array, " T"],
    done: Bool[Array, " T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al., ICLR 2016, equation 16).

    `A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}`, `delta_t = r_t + gamma V'_t - V_t`, where
    `V'` comes from `bootstrap_values`; the target is `A_t + V_t`.
    """
    delta = reward + gamma * next_value - value
    decay = jnp.where(done, 0.0, gamma * gae_lambda)

    def backwards(following, now):
        delta_t, decay_t = now
        advantage = delta_t + decay_t * following
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.float32(0), (delta, decay), reverse=True, unroll=8)
    return Advantages(advantage, advantage + value)
