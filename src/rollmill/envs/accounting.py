"""Accounting transforms, which sum up the rewards and count the steps of each episode.

Both transforms wrap an environment with auto-reset (`auto_reset`), and keep their sums in its state.

Shape letter: `A` agents of a kind.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.types import Environment, Params, State, Timestep
from rollmill.envs.agents import active_agents
from rollmill.envs.field_checks import as_timestep
from rollmill.envs.transforms import wrap


class EpisodeState(eqx.Module):
    """State of an environment, with the return and the length of the current episode."""

    inner: PyTree[Array]
    episode_return: Float[Array, ""]
    episode_length: Int[Array, ""]
    agent_returns: dict[str, Float[Array, ""]]
    """Return of each agent kind. Empty in a single-agent environment."""


def record_episodes(env: Environment) -> Environment:
    """Adds `info["episode_return"]` and `info["episode_length"]`: sums over the episode up to this step.

    In a multi-agent environment, an agent's return is the sum of its rewards while it was active, and
    `episode_return` is the mean over all agents of all kinds. This is the team's return if all get the same
    rewards, and about zero in a zero-sum game. `info["agent_returns"]` is then a dictionary with the mean over the
    agents of each kind.

    In a two-player game, the return belongs to player 0, who moves first: the rewards of its own moves minus the
    rewards of the opponent's moves. If a win pays 1, the mean over episodes is the share of games won by the first
    player, minus the share of games lost.
    """

    def reset(key, params):
        observation, state = env.reset(key, params)
        return observation, EpisodeState(state, jnp.float32(0), jnp.int32(0), _zero_returns(env))

    def step(key, state, action, params):
        timestep = as_timestep(env.name, env.step(key, state.inner, action, params))
        kind_rewards, mean_reward = _mean_rewards(env, state.inner, timestep, params)
        episode_return, length = state.episode_return + mean_reward, state.episode_length + 1
        kind_returns = jax.tree.map(jnp.add, state.agent_returns, kind_rewards)
        done = timestep.terminated | timestep.truncated
        reset_if_done = lambda total: jnp.where(done, 0, total)
        next_state = EpisodeState(
            timestep.state,
            reset_if_done(episode_return),
            reset_if_done(length),
            jax.tree.map(reset_if_done, kind_returns),
        )
        agent_returns = {"agent_returns": kind_returns} if env.agents else {}
        info = {**timestep.info, "episode_return": episode_return, "episode_length": length, **agent_returns}
        return timestep._replace(state=next_state, info=info)

    return wrap(env, reset, step)


def _zero_returns(env: Environment) -> dict[str, Float[Array, ""]]:
    return {kind.name: jnp.float32(0) for kind in env.agents}


def _mean_rewards(
    env: Environment, state: State, timestep: Timestep, params: Params
) -> tuple[dict[str, Float[Array, ""]], Float[Array, ""]]:
    """Mean reward of each kind in a step from `state`, and of all agents. Inactive agents count as 0.

    With a single agent there are no kinds, and the mean is the reward, or player 0's in a two-player game.
    """
    if not env.agents:
        return {}, _first_players_reward(env, state, timestep, params)
    active = active_agents(env, state, params)
    rewards = {name: jnp.where(active[name], timestep.reward[name], 0) for name in active}
    num_agents = sum(kind.count for kind in env.agents)
    overall = jnp.sum(jnp.stack([reward.sum() for reward in rewards.values()])) / num_agents
    return {name: reward.mean() for name, reward in rewards.items()}, overall


def _first_players_reward(env: Environment, state: State, timestep: Timestep, params: Params) -> Float[Array, ""]:
    """Reward of player 0 in a step from `state`: of the only player, or in a zero-sum game of two."""
    if env.to_move is None:
        return timestep.reward
    return jnp.where(env.to_move(state, params) == 0, timestep.reward, -timestep.reward)


class DiscountedState(eqx.Module):
    """State of an environment, with the discounted sum of its rewards."""

    inner: PyTree[Array]
    discounted_return: PyTree[Float[Array, "..."]]


def record_discounted_returns(env: Environment, gamma: float) -> Environment:
    """Adds `info["discounted_return"]`, `R = gamma R + r`, reset to 0 at the end of an episode.

    Its standard deviation is used to normalise rewards (Engstrom et al., "Implementation Matters in Deep Policy
    Gradients", ICLR 2020). In a multi-agent environment, the entry is a dictionary of kinds, with one sum for each
    agent, `[A]`. The sum of an inactive agent is 0.
    """

    def reset(key, params):
        observation, state = env.reset(key, params)
        zeros = {kind.name: jnp.zeros(kind.count, jnp.float32) for kind in env.agents}
        return observation, DiscountedState(state, zeros if env.agents else jnp.float32(0))

    def step(key, state, action, params) -> Timestep:
        timestep = as_timestep(env.name, env.step(key, state.inner, action, params))
        accumulate = lambda total, reward: jnp.float32(gamma) * total + reward
        discounted = jax.tree.map(accumulate, state.discounted_return, timestep.reward)
        if env.agents:
            active = active_agents(env, state.inner, params)
            discounted = {name: jnp.where(active[name], sums, 0) for name, sums in discounted.items()}
        done = timestep.terminated | timestep.truncated
        carried = jax.tree.map(lambda x: jnp.where(done, 0, x), discounted)
        info = {**timestep.info, "discounted_return": discounted}
        return timestep._replace(state=DiscountedState(timestep.state, carried), info=info)

    return wrap(env, reset, step)
