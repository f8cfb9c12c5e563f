"""Probe environments: tiny tasks with known values, each of which reveals one kind of mistake in an algorithm.

Use them in order. The first probe that an algorithm fails shows which part is wrong: the value loss, the network
or its observations, discounting, the policy loss, credit assignment by observation, or bootstrapping. The idea
comes from Andy L. Jones ("Debugging reinforcement learning systems without the agonizing pain", 2021). `gamma`
is the algorithm's discount factor throughout.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.types import Action, Environment, Key, Timestep
from rollmill.envs.transforms import time_limit

NUM_MASKED_ACTIONS = 4
"""Actions of `Probe-ActionMask-v0`, of which two are legal in each episode."""

START_REWARD = -10.0
"""Reward of the first step of an episode of `Probe-Truncation-v0`."""


class ProbeState(eqx.Module):
    """State of a probe environment: its current observation."""

    shown: Float[Array, " n"]


class MaskedProbeState(eqx.Module):
    """State of the probe `action_mask`: the legal actions of this episode."""

    legal: Bool[Array, " actions"]


def constant_reward() -> Environment:
    """Probe with one step, 2 actions, observation 0 and reward 1. The value is 1 for every policy.

    If an algorithm fails this probe, its value loss or optimiser is wrong.
    """
    return _one_step("ConstantReward", spaces.Discrete(2), _zero, lambda shown, action: jnp.float32(1.0))


def observation_reward() -> Environment:
    """Probe with one step, whose reward is the observation, -1 or 1. The value equals the observation.

    There are 2 actions. If an algorithm passes `constant_reward` but fails this probe, the network does not
    receive the observation, or observations and returns are paired wrongly.
    """
    return _one_step("ObservationReward", spaces.Discrete(2), _sign, lambda shown, action: shown[0])


def discounted_reward() -> Environment:
    """Probe with two steps and rewards 0 and 1. The values of the observations 0 and 1 are gamma and 1.

    There are 2 actions, and the second step terminates. If an algorithm passes the previous probes but fails this
    one, its discounting is wrong.
    """

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, "1"], ProbeState]:
        return _show(jnp.zeros((1,), jnp.float32))

    def step(key: Key, state: ProbeState, action: Int[Array, ""], params: tuple[()]) -> Timestep:
        observation, after = _show(jnp.ones((1,), jnp.float32))
        return Timestep(observation, after, state.shown[0], state.shown[0] > 0, _no(), {})

    return Environment("Probe-DiscountedReward-v0", reset, step, spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2))


def action_reward() -> Environment:
    """Probe with one step, in which action 1 pays 1 and action 0 pays -1. The best return is 1.

    The observation is 0. The value is `2 p - 1` for a policy that takes action 1 with probability p. If an
    algorithm passes the previous probes but fails this one, the policy loss or its sign is wrong.
    """
    return _one_step("ActionReward", spaces.Discrete(2), _zero, lambda shown, action: _pay(action == 1))


def action_observation() -> Environment:
    """Probe with one step, in which the right action depends on the observation. The best return is 1.

    Action 1 pays 1 if the observation is 1, and action 0 pays 1 if it is -1. The other action pays -1. The best
    value is 1 everywhere, and a policy that ignores the observation has value 0. If an algorithm passes the
    previous probes but fails this one, actions and advantages are paired wrongly.
    """
    return _one_step(
        "ActionObservation",
        spaces.Discrete(2),
        _sign,
        lambda shown, action: _pay((action == 1) == (shown[0] > 0)),
    )


def truncation(*, episode_length: int = 4) -> Environment:
    """Probe with reward 1 forever, which is truncated every few steps. The value is 1 / (1 - gamma).

    All steps of an episode but the first start from observation 1, which has this value. The first step starts
    from observation 0 and pays -10, so its value is -10 + gamma / (1 - gamma). No episode terminates.

    An algorithm that treats truncation as termination, or bootstraps from the observation after the reset (0)
    instead of the final observation (1), learns a wrong value of observation 1. For gamma = 0.9 and episodes of 4
    steps, the right value is 10. The first mistake gives 2.5 with one-step returns (1.9 with returns of whole
    episodes), and the second mistake gives -15.4 (-16).

    Args:
        episode_length: steps until the truncation, at least 2.
    """

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, "1"], ProbeState]:
        return _show(jnp.zeros((1,), jnp.float32))

    def step(key: Key, state: ProbeState, action: Int[Array, ""], params: tuple[()]) -> Timestep:
        observation, after = _show(jnp.ones((1,), jnp.float32))
        reward = jnp.where(state.shown[0] > 0, jnp.float32(1.0), jnp.float32(START_REWARD))
        return Timestep(observation, after, reward, _no(), _no(), {})

    env = Environment("Probe-Truncation-v0", reset, step, spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2))
    return time_limit(env, episode_length)


def continuous_action() -> Environment:
    """Probe with reward 1 - (action - observation)² in one step. The best action is the observation, its value 1.

    The observation is uniform in [-1, 1], and actions have the same range.
    """
    return _one_step(
        "ContinuousAction",
        spaces.Box(-1.0, 1.0, (1,), np.float32),
        lambda key: jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0),
        lambda shown, action: 1.0 - jnp.square(action[0] - shown[0]),
    )


def multi_discrete() -> Environment:
    """Probe for `MultiDiscrete([2, 3])` actions, with one step. The best return is 1.

    Each component of the action that equals its component of the observation pays 1/2. Observations are floats.
    The uniform policy has the value 1/4 + 1/6.
    """

    def draw(key: Key) -> Float[Array, "2"]:
        return jax.random.randint(key, (2,), jnp.zeros((2,), jnp.int32), jnp.array([2, 3])).astype(jnp.float32)

    return _one_step(
        "MultiDiscrete",
        spaces.MultiDiscrete([2, 3]),
        draw,
        lambda shown, action: jnp.mean((action.astype(jnp.float32) == shown).astype(jnp.float32)),
        observation_space=spaces.Box(0.0, np.array([1.0, 2.0], np.float32), dtype=np.float32),
    )


def action_mask() -> Environment:
    """Probe in which 2 of 4 actions are legal and pay 1, while the others pay -1. The best return is 1.

    The legal actions are drawn for each episode, which has one step. Only the mask shows them, because the
    observation is 0. The value is 1 for every policy that respects the mask, and 0 for every policy that ignores
    it.
    """

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, "1"], MaskedProbeState]:
        first_key, gap_key = jax.random.split(key)
        first = jax.random.randint(first_key, (), 0, NUM_MASKED_ACTIONS)
        second = (first + jax.random.randint(gap_key, (), 1, NUM_MASKED_ACTIONS)) % NUM_MASKED_ACTIONS
        actions = jnp.arange(NUM_MASKED_ACTIONS)
        return jnp.zeros((1,), jnp.float32), MaskedProbeState(legal=(actions == first) | (actions == second))

    def step(key: Key, state: MaskedProbeState, action: Int[Array, ""], params: tuple[()]) -> Timestep:
        reward = _pay(state.legal[action])
        return Timestep(jnp.zeros((1,), jnp.float32), state, reward, _yes(), _no(), {})

    return Environment(
        "Probe-ActionMask-v0",
        reset,
        step,
        spaces.Box(0.0, 0.0, (1,)),
        spaces.Discrete(NUM_MASKED_ACTIONS),
        action_mask=lambda state, params: state.legal,
    )


def _one_step(
    name: str,
    action_space: spaces.Space,
    draw: Callable[[Key], Float[Array, " n"]],
    pay: Callable[[Float[Array, " n"], Action], Float[Array, ""]],
    *,
    observation_space: spaces.Space | None = None,
) -> Environment:
    """Returns an environment that observes `draw(key)`, pays `pay(observation, action)` and terminates."""

    def reset(key: Key, params: tuple[()]) -> tuple[Float[Array, " n"], ProbeState]:
        return _show(draw(key))

    def step(key: Key, state: ProbeState, action: Action, params: tuple[()]) -> Timestep:
        return Timestep(state.shown, state, pay(state.shown, action), _yes(), _no(), {})

    space = observation_space or spaces.Box(-1.0, 1.0, (1,), np.float32)
    return Environment(f"Probe-{name}-v0", reset, step, space, action_space)


def _show(shown: Float[Array, " n"]) -> tuple[Float[Array, " n"], ProbeState]:
    return shown, ProbeState(shown=shown)


def _zero(key: Key) -> Float[Array, "1"]:
    return jnp.zeros((1,), jnp.float32)


def _sign(key: Key) -> Float[Array, "1"]:
    return jax.random.rademacher(key, (1,), jnp.float32)


def _pay(right: Bool[Array, ""]) -> Float[Array, ""]:
    return jnp.where(right, jnp.float32(1.0), jnp.float32(-1.0))


def _yes() -> Bool[Array, ""]:
    return jnp.ones((), bool)


def _no() -> Bool[Array, ""]:
    return jnp.zeros((), bool)
