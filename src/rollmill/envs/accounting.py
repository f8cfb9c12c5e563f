"""Transforms that count: returns and lengths of episodes, discounted returns for reward scaling.

Both go around an environment that resets itself (`auto_reset`) and keep their sums in its state.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.types import Environment, Timestep


class EpisodeState(eqx.Module):
    """An environment's state beside the return and length of the running episode."""

    inner: PyTree[Array]
    episode_return: Float[Array, ""]
    episode_length: Int[Array, ""]


def record_episodes(env: Environment) -> Environment:
    """Adds `info["episode_return"]` and `info["episode_length"]`: sums of the episode up to this step."""

    def reset(key, params):
        observation, state = env.reset(key, params)
        return observation, EpisodeState(state, jnp.float32(0), jnp.int32(0))

    def step(key, state, action, params):
        timestep = env.step(key, state.inner, action, params)
        so_far, length = state.episode_return + timestep.reward, state.episode_length + 1
        done = timestep.terminated | timestep.truncated
        after = EpisodeState(timestep.state, jnp.where(done, 0, so_far), jnp.where(done, 0, length))
        info = {**timestep.info, "episode_return": so_far, "episode_length": length}
        return timestep._replace(state=after, info=info)

    return _with_inner_mask(env, reset, step)


class DiscountedState(eqx.Module):
    """An environment's state beside the discounted sum of its rewards."""

    inner: PyTree[Array]
    discounted_return: Float[Array, ""]


def record_discounted_returns(env: Environment, gamma: float) -> Environment:
    """Adds `info["discounted_return"]`, `R = gamma R + r`, set back where an episode terminates.

    Its standard deviation is what rewards are divided by (Engstrom et al., "Implementation Matters
    in Deep Policy Gradients", ICLR 2020).
    """

    def reset(key, params):
        observation, state = env.reset(key, params)
        return observation, DiscountedState(state, jnp.float32(0))

    def step(key, state, action, params) -> Timestep:
        timestep = env.step(key, state.inner, action, params)
        discounted = jnp.float32(gamma) * state.discounted_return + timestep.reward
        after = DiscountedState(timestep.state, jnp.where(timestep.terminated, 0, discounted))
        return timestep._replace(state=after, info={**timestep.info, "discounted_return": discounted})

    return _with_inner_mask(env, reset, step)


def _with_inner_mask(env: Environment, reset, step) -> Environment:
    mask = env.action_mask
    inner_mask = None if mask is None else (lambda state, params: mask(state.inner, params))
    return env._replace(reset=reset, step=step, action_mask=inner_mask)
