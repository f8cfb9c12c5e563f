"""Advantages and returns for ONE environment, to be lifted by `vmap`.

Shape letter: `T` steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rollmill.algorithms.hyperparameters import Number

UNROLLED, UNROLLED_ON_CPU = 32, 4
"""Number of rollout steps compiled into one loop iteration. On a GPU, each iteration costs four launches.

On CPUs, longer loop bodies take seconds to compile, and vectorise worse.
"""


class Advantages(NamedTuple):
    """Training signals of a rollout: advantages for the policy, and targets for the critic."""

    advantage: Float[Array, " T"]
    """Advantage of each action, for the policy."""
    target: Float[Array, " T"]
    """Estimated return from each step, for the critic."""


def bootstrap_values(
    value: Float[Array, " T"],
    last_value: Float[Array, ""],
    final_value: Float[Array, " T"],
    terminated: Bool[Array, " T"],
    truncated: Bool[Array, " T"],
) -> Float[Array, " T"]:
    """Returns the value to bootstrap from after each step: `V(s_{t+1})` within an episode.

    After a termination, the value is 0. After a truncation, it is the value of the final observation, and not of
    the first observation of the next episode, which auto-reset returns (Pardo et al., "Time Limits in
    Reinforcement Learning", ICML 2018).

    Args:
        value: `V(s_t)`.
        last_value: `V(s_T)`, after the last step of the rollout.
        final_value: value of the observation after each step, before any reset. It is used only if `truncated`.
        terminated: whether the episode terminated at this step.
        truncated: whether the episode was truncated at this step.
    """
    next_value = jnp.concatenate([value[1:], last_value[None]])
    next_value = jnp.where(truncated, final_value, next_value)
    # Termination takes precedence: nothing is bootstrapped after a step that is both.
    return jnp.where(terminated, 0.0, next_value)


def generalised_advantages(
    reward: Float[Array, " T"],
    value: Float[Array, " T"],
    next_value: Float[Array, " T"],
    done: Bool[Array, " T"],
    *,
    gamma: Number,
    gae_lambda: Number,
) -> Advantages:
    """Computes advantages by generalised advantage estimation (Schulman et al., ICLR 2016, equation 16).

    `A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}`, with `delta_t = r_t + gamma V'_t - V_t`, where `V'` comes
    from `bootstrap_values`. The target of the critic is `A_t + V_t`.
    """
    delta = reward + gamma * next_value - value
    decay = jnp.where(done, 0.0, gamma * gae_lambda)
    advantage = decaying_sum(delta, decay)
    return Advantages(advantage, advantage + value)


def lambda_returns(
    reward: Float[Array, " T"],
    next_value: Float[Array, " T"],
    discount: Float[Array, " T"],
    done: Bool[Array, " T"],
    *,
    td_lambda: Number,
) -> Float[Array, " T"]:
    """Computes lambda returns in which each step has its own discount (Sutton and Barto, 2018, section 12.2).

    `G_t = r_t + d_t ((1 - lambda) V'_t + lambda G_{t+1})` within an episode, and `r_t + d_t V'_t` at its end and
    at the end of the rollout. In a zero-sum game of two, with reward and value for the player to move, the
    discount is negative if the turn passes: the opponent's value counts against the player.

    Args:
        reward: `r_t`.
        next_value: `V'_t`, the value after each step, from `bootstrap_values`.
        discount: `d_t`, the discount of everything after the step.
        done: the episode ended at this step.
        td_lambda: 0 is one-step, 1 is Monte Carlo.
    """
    goes_on = ~done & (jnp.arange(done.size) < done.size - 1)
    decay = jnp.where(goes_on, td_lambda * discount, 0.0)
    return decaying_sum(reward + (discount - decay) * next_value, decay)


def n_step_returns(
    reward: Float[Array, " T"], next_value: Float[Array, " T"], done: Bool[Array, " T"], *, gamma: Number, n: int
) -> Float[Array, " T"]:
    """Computes returns over `n` steps, or fewer at the end of an episode or of the sequence.

    `G_t = r_t + gamma r_{t+1} + ... + gamma^(k-1) r_{t+k-1} + gamma^k V'_{t+k-1}`, where `k` is the largest number
    of steps up to `n` that remain in the episode and in the sequence.

    Args:
        reward: `r_t`.
        next_value: `V'_t`, the value after each step, from `bootstrap_values`.
        done: the episode ended at this step.
        gamma: discount factor of a step.
        n: maximum number of steps in a return.
    """
    ends = done | (jnp.arange(done.size) == done.size - 1)

    def extended(_: Int[Array, ""], returns: Float[Array, " T"]) -> Float[Array, " T"]:
        return reward + gamma * jnp.where(ends, next_value, jnp.roll(returns, -1))

    return jax.lax.fori_loop(1, n, extended, reward + gamma * next_value)


def vtrace(
    log_ratio: Float[Array, " T"],
    reward: Float[Array, " T"],
    value: Float[Array, " T"],
    next_value: Float[Array, " T"],
    done: Bool[Array, " T"],
    *,
    gamma: Number,
    clip_rho: Number = 1.0,
    clip_c: Number = 1.0,
    trace_decay: Number = 1.0,
) -> Advantages:
    """Computes V-trace targets for a rollout of another policy (Espeholt et al., "IMPALA", ICML 2018, section 4).

    With `rho_t = min(clip_rho, ratio_t)` and `c_t = trace_decay min(clip_c, ratio_t)`, the target is

        v_t = V_t + rho_t delta_t + gamma c_t (1 - done_t) (v_{t+1} - V_{t+1}),

    `delta_t = r_t + gamma V'_t - V_t`, and the advantage `rho_t (r_t + gamma v'_t - V_t)`. `V'` comes from
    `bootstrap_values`; `v'` is the target of the next step, or `V'` at the end of an episode or of the rollout. If
    behaviour and target policy are equal, all ratios are 1, and the targets equal the results of
    `generalised_advantages` with lambda = `trace_decay`.

    Args:
        log_ratio: log of the importance ratio, learner's policy over behaviour policy.
        reward: `r_t`.
        value: `V_t`, by the learner's critic.
        next_value: `V'_t`, the value after each step.
        done: the episode ended at this step; the trace is cut.
        gamma: discount factor.
        clip_rho: bound on the ratio that weighs a step's own error. If it binds, values converge to a policy
            between behaviour and target policy.
        clip_c: bound on the ratios that propagate later errors back; it affects the speed of convergence,
            not the fixed point.
        trace_decay: lambda (their remark 2).
    """
    ratio = jnp.exp(log_ratio)
    rho = jnp.minimum(clip_rho, ratio)
    decay = jnp.where(done, 0.0, gamma * trace_decay * jnp.minimum(clip_c, ratio))
    correction = decaying_sum(rho * (reward + gamma * next_value - value), decay)  # v_t - V_t
    # v'_t - V'_t. Within an episode, V'_t is V_{t+1}. At its end, and after the last step, v'_t is V'_t.
    next_correction = jnp.where(done, 0.0, jnp.append(correction[1:], 0.0))
    advantage = rho * (reward + gamma * (next_value + next_correction) - value)
    return Advantages(advantage, value + correction)


def decaying_sum(term: Float[Array, " T"], decay: Float[Array, " T"]) -> Float[Array, " T"]:
    """Computes `x_t = term_t + decay_t x_{t+1}` backwards from `x_T = 0`."""

    def step_back(x_tp1, inputs):
        term_t, decay_t = inputs
        x_t = term_t + decay_t * x_tp1
        return x_t, x_t

    def unrolled(unroll: int) -> Callable[..., Array]:
        start = jnp.float32(0)
        return lambda *inputs: jax.lax.scan(step_back, start, inputs, reverse=True, unroll=unroll)[1]

    return jax.lax.platform_dependent(term, decay, cpu=unrolled(UNROLLED_ON_CPU), default=unrolled(UNROLLED))
