"""The search of Gumbel AlphaZero (Danihelka et al., "Policy improvement by planning with Gumbel", ICLR 2022).

At the root, actions are drawn without replacement, and their number is halved repeatedly until one is left. Below
the root, actions are chosen so that visits follow the improved policy.

Shape letter: `A` actions.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.types import Key
from rollmill.tree_search.tree import EvaluatedPosition, Model, SearchResult, Statistics, best_action, run_search

VISIT_OFFSET = 50.0
"""Number added to the visits of the most visited action when values are weighted (c_visit of the paper)."""
LOWEST_SCORE = -1e9
"""Minimum score of a considered action at the root. Other actions have a lower score."""


def gumbel_search(
    key: Key,
    root: EvaluatedPosition,
    legal: Bool[Array, " A"],
    model: Model,
    *,
    num_simulations: int,
    max_depth: int,
    max_considered_actions: int,
    gumbel_scale: float,
    value_scale: float,
    rescale_values: bool,
) -> SearchResult:
    """Runs the search of Gumbel AlphaZero from one position.

    Args:
        key: random key of the Gumbel noise.
        root: the evaluated position, with very low logits for illegal actions.
        legal: True for each legal action.
        model: function that steps and evaluates copies of the position.
        num_simulations: number of simulations, at least 1.
        max_depth: maximum depth of the tree.
        max_considered_actions: maximum number of actions considered at the root.
        gumbel_scale: scale of the noise, or 0 for no noise.
        value_scale: weight of values relative to logits (c_scale of the paper).
        rescale_values: whether to map the values of each node's actions to [0, 1].
    """
    noise = gumbel_scale * jax.random.gumbel(key, root.logits.shape)
    considered = min(max_considered_actions, root.logits.size)
    schedule = jnp.asarray([halving_schedule(count, num_simulations) for count in range(considered + 1)])
    own_schedule = schedule[jnp.minimum(considered, jnp.sum(legal, dtype=jnp.int32))]
    improved = partial(improved_logits, scale=value_scale, rescale=rescale_values)

    def best(node: Statistics, visits: Float[Array, ""]) -> Int[Array, ""]:
        """Returns the best legal action with `visits` visits."""
        score = noise + improved(node) - jnp.max(node.edges.logits)
        score = jnp.maximum(score, LOWEST_SCORE)
        return best_action(jnp.where(legal & (node.edges.visits == visits), score, -jnp.inf))

    def root_rule(node: Statistics) -> Int[Array, ""]:
        simulation = jnp.minimum(jnp.sum(node.edges.visits).astype(jnp.int32), num_simulations - 1)
        return best(node, own_schedule[simulation])

    def rule(node: Statistics) -> Int[Array, "..."]:
        visits = node.edges.visits
        return best_action(
            jax.nn.softmax(improved(node)) - visits / (1.0 + jnp.sum(visits, axis=-1, keepdims=True))
        )

    node = run_search(
        root, model, root_rule=root_rule, rule=rule, num_simulations=num_simulations, max_depth=max_depth
    )
    weights = jax.nn.softmax(jnp.where(legal, improved(node), -jnp.inf))
    return SearchResult(best(node, jnp.max(node.edges.visits)), weights, node.value)


def halving_schedule(num_considered: int, num_simulations: int) -> np.ndarray:
    """Returns the visit count of the action that each simulation tries at the root, by sequential halving.

    The result has the shape `[num_simulations]`. A simulation tries the best action that has been visited
    exactly this often. First, all considered actions are visited equally often, then the better half of them,
    and so on down to two (Karnin et al., ICML 2013).
    """
    if num_considered <= 1:
        return np.arange(num_simulations, dtype=np.float32)
    phases = math.ceil(math.log2(num_considered))
    schedule: list[int] = []
    rounds, remaining = 0, num_considered
    while len(schedule) < num_simulations:
        for _ in range(max(1, num_simulations // (phases * remaining))):
            schedule += [rounds] * remaining
            rounds += 1
        remaining = max(2, remaining // 2)
    return np.asarray(schedule[:num_simulations], np.float32)


def improved_logits(node: Statistics, *, scale: float, rescale: bool) -> Float[Array, "... A"]:
    """Returns the logits of the improved policy: the logits of the prior plus the weighted values of all actions.

    An action without visits gets the node's value, which combines the network's value with the values of visited
    actions (appendix D of the paper).
    """
    edges, tiny = node.edges, jnp.finfo(jnp.float32).tiny
    visited = edges.visits > 0
    visits = jnp.sum(edges.visits, axis=-1)
    visited_prior = jnp.where(visited, jnp.maximum(edges.prior, tiny), 0.0)
    mean = jnp.sum(visited_prior * edges.value, axis=-1) / jnp.maximum(jnp.sum(visited_prior, axis=-1), tiny)
    node_value = (node.prior_value + visits * mean) / (1.0 + visits)
    values = jnp.where(visited, edges.value, node_value[..., None])
    if rescale:
        lowest = jnp.min(values, axis=-1, keepdims=True)
        values = (values - lowest) / jnp.maximum(jnp.max(values, axis=-1, keepdims=True) - lowest, 1e-8)
    weight = scale * (VISIT_OFFSET + jnp.max(edges.visits, axis=-1, keepdims=True))
    return edges.logits + weight * values
