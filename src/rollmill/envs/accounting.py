"""Transforms that count: returns and lengths of episodes, discounted returns for reward scaling.

Both go around an environment that resets itself (`auto_reset`) and keep their sums in its state.
Shape letter: `A` agents of a kind.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.types import Environment, Params, State, Timestep
from rollmill.envs.agents import active_agents
from rollmill.envs.transforms import wrap


class EpisodeState(eqx.Module):
    """An environment's state beside the returns and the length of the running episode."""

    inner: PyTree[Array]
    episode_return: Float[Array, ""]
    episode_length: Int[Array, ""]
    agent_returns: dict[str, Float[Array, ""]]
    """Kind of agents to return; empty where there is a single agent."""


def record_episodes(env: Environment) -> Environment:
    """Adds `info["episode_return"]` and `info["episode_length"]`: sums of the episode up to this step.

    Where there are several agents, an agent's return is the sum of what it was paid while it was active, and
    `episode_return` is the mean over all agents of all kinds: what an agent gets on average, which is the
    team's return where all are paid alike, and next to nothing where the gain of one is another's loss.
    `info["agent_returns"]` then is a dictionary from each kind to the mean over its agents.
    """

    def reset(key, params):
        observation, state = env.reset(key, params)
        return observation, EpisodeState(state, jnp.float32(0), jnp.int32(0), _zero_returns(env))

    def step(key, state, action, params):
        timestep = env.step(key, state.inner, action, params)
        each, mean = _paid(env, state.inner, timestep, params)
        so_far, length = state.episode_return + mean, state.episode_length + 1
        of_kinds = jax.tree.map(jnp.add, state.agent_returns, each)
        done = timestep.terminated | timestep.truncated
        fresh = lambda count: jnp.where(done, 0, count)
        after = EpisodeState(timestep.state, fresh(so_far), fresh(length), jax.tree.map(fresh, of_kinds))
        returns = {"agent_returns": of_kinds} if env.agents else {}
        info = {**timestep.info, "episode_return": so_far, "episode_length": length, **returns}
        return timestep._replace(state=after, info=info)

    return wrap(env, reset, step)


def _zero_returns(env: Environment) -> dict[str, Float[Array, ""]]:
    return {kind.name: jnp.float32(0) for kind in env.agents}


def _paid(
    env: Environment, state: State, timestep: Timestep, params: Params
) -> tuple[dict[str, Float[Array, ""]], Float[Array, ""]]:
    """The mean over each kind of what its agents were paid in a step from `state`, and the mean over all."""
    if not env.agents:
        return {}, timestep.reward
    active = active_agents(env, state, params)
    paid = {name: jnp.where(active[name], timestep.reward[name], 0) for name in active}
    total = sum(kind.count for kind in env.agents)
    everyone = jnp.sum(jnp.stack([amounts.sum() for amounts in paid.values()])) / total
    return {name: amounts.mean() for name, amounts in paid.items()}, everyone


class DiscountedState(eqx.Module):
    """An environment's state beside the discounted sum of its rewards."""

    inner: PyTree[Array]
    discounted_return: PyTree[Float[Array, "..."]]


def record_discounted_returns(env: Environment, gamma: float) -> Environment:
    """Adds `info["discounted_return"]`, `R = gamma R + r`, set back where an episode terminates.

    Its standard deviation is what rewards are divided by (Engstrom et al., "Implementation Matters
    in Deep Policy Gradients", ICLR 2020). Where there are several agents, it is a dictionary from kinds to
    one sum for each agent, `[A]`; 0 for those that are out.
    """

    def reset(key, params):
        observation, state = env.reset(key, params)
        zeros = {kind.name: jnp.zeros(kind.count, jnp.float32) for kind in env.agents}
        return observation, DiscountedState(state, zeros if env.agents else jnp.float32(0))

    def step(key, state, action, params) -> Timestep:
        timestep = env.step(key, state.inner, action, params)
        counted = lambda so_far, reward: jnp.float32(gamma) * so_far + reward
        discounted = jax.tree.map(counted, state.discounted_return, timestep.reward)
        if env.agents:
            active = active_agents(env, state.inner, params)
            discounted = {name: jnp.where(active[name], sums, 0) for name, sums in discounted.items()}
        left = jax.tree.map(lambda x: jnp.where(timestep.terminated, 0, x), discounted)
        info = {**timestep.info, "discounted_return": discounted}
        return timestep._replace(state=DiscountedState(timestep.state, left), info=info)

    return wrap(env, reset, step)
