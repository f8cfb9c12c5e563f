"""Advantages and returns, for ONE environment; `vmap` lifts them.

Shape letter: `T` steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

UNROLLED = 32
"""Steps of a rollout that are compiled as one turn of a loop: on a GPU a turn is four launches, short or long."""


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
    advantage = _decaying_sum(delta, decay)
    return Advantages(advantage, advantage + value)


def vtrace(
    log_ratio: Float[Array, " T"],
    reward: Float[Array, " T"],
    value: Float[Array, " T"],
    next_value: Float[Array, " T"],
    done: Bool[Array, " T"],
    *,
    gamma: float,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    trace_decay: float = 1.0,
) -> Advantages:
    """V-trace: from a rollout that another policy collected (Espeholt et al., "IMPALA", ICML 2018, section 4).

    With `rho_t = min(clip_rho, ratio_t)` and `c_t = trace_decay min(clip_c, ratio_t)`, the target is

        v_t = V_t + rho_t delta_t + gamma c_t (1 - done_t) (v_{t+1} - V_{t+1}),

    `delta_t = r_t + gamma V'_t - V_t`, and the advantage `rho_t (r_t + gamma v'_t - V_t)`. `V'` comes from
    `bootstrap_values`; `v'` is the target of the next step, or `V'` at the end of an episode or of the
    rollout. Where the policy that collected is the one that learns, all ratios are 1, and the targets
    are those of `generalised_advantages` with lambda = `trace_decay`.

    Args:
        log_ratio: log of how much more likely the action is to the policy that learns.
        reward: `r_t`.
        value: `V_t`, by the critic that learns.
        next_value: `V'_t`, the value that follows each step.
        done: the episode ended at this step; the trace is cut.
        gamma: discount factor.
        clip_rho: bound on the ratio of a step's own error; where it binds, the values that are learned
            are those of a policy between the one that collected and the one that learns.
        clip_c: bound on the ratios that carry later errors back; it changes how fast values are learned,
            not which.
        trace_decay: lambda (their remark 2).
    """
    ratio = jnp.exp(log_ratio)
    rho = jnp.minimum(clip_rho, ratio)
    decay = jnp.where(done, 0.0, gamma * trace_decay * jnp.minimum(clip_c, ratio))
    correction = _decaying_sum(rho * (reward + gamma * next_value - value), decay)
    following = jnp.where(done, 0.0, jnp.append(correction[1:], 0.0))
    advantage = rho * (reward + gamma * (next_value + following) - value)
    return Advantages(advantage, value + correction)


def _decaying_sum(term: Float[Array, " T"], decay: Float[Array, " T"]) -> Float[Array, " T"]:
    """`x_t = term_t + decay_t x_{t+1}`, from the last step, which nothing follows, to the first."""

    def backwards(following, now):
        term_t, decay_t = now
        found = term_t + decay_t * following
        return found, found

    return jax.lax.scan(backwards, jnp.float32(0), (term, decay), reverse=True, unroll=UNROLLED)[1]
