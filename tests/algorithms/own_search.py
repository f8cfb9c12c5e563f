"""A search in one file: all actions of the next two plies, and the network's values of the positions after them.

It is a policy fragment that takes the place of AlphaZero's own.
"""

from functools import partial

import jax
import jax.numpy as jnp

from rollmill.algorithms.alphazero import Planner, SearchExtras
from rollmill.dataflow import Decision, UnfusedPolicy
from rollmill.envs.agents import legal_actions
from rollmill.tree_search.positions import discrete_action


def with_two_plies(graph, *, temperature=0.1):
    """AlphaZero's graph with this search instead of its own."""
    planner = graph.gradients.loss.args[0]
    return graph._replace(
        policy=UnfusedPolicy(partial(decide, planner, temperature, True), "a search looks two plies ahead"),
        greedy=partial(decide, planner, temperature, False),
    )


def decide(planner: Planner, temperature, explores, weights, key, memory, observation, now):
    """Draws the action by the values of the search, or takes the best one."""
    scores = jnp.where(
        now.action_mask, values_of(planner, weights.network, now.state, now.params, plies=2), -jnp.inf
    )
    improved = jax.nn.softmax(scores / temperature)
    choice = jax.random.categorical(key, scores / temperature) if explores else jnp.argmax(scores)
    prior, _ = planner.predict(weights.network, observation, now.action_mask)
    _, discount = planner.advance(now.state, choice, now.params)
    agrees = (jnp.argmax(prior) == jnp.argmax(scores)).astype(jnp.float32)
    return Decision(
        discrete_action(planner.env, choice), memory, SearchExtras(improved, jnp.max(scores), discount, agrees)
    )


def values_of(planner, network, state, params, *, plies):
    """Values of all actions, for the player to move."""

    def after(choice):
        timestep, discount = planner.advance(state, choice, params)
        if plies == 1:
            later = planner.value(network, timestep.observation)
        else:
            mask = legal_actions(planner.env, timestep.state, params)
            replies = values_of(planner, network, timestep.state, params, plies=plies - 1)
            later = jnp.max(jnp.where(mask, replies, -jnp.inf))
        return timestep.reward + jnp.where(discount == 0, 0.0, discount * later)

    return jax.vmap(after)(jnp.arange(int(planner.env.action_space.n)))
