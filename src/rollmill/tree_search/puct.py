"""The search of AlphaZero: upper confidence bounds weighted by the prior, with Dirichlet noise (PUCT).

Silver et al., "A general reinforcement learning algorithm that masters chess, shogi, and Go through self-play",
Science 2018; values are mapped to [0, 1] as in appendix B of Schrittwieser et al., "Mastering Atari, Go, chess and
shogi by planning with a learned model", Nature 2020. Ties go to the first action.

Shape letter: `A` actions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.types import Key
from rollmill.tree_search.tree import EvaluatedPosition, Model, SearchResult, Statistics, best_action, run_search

PRIOR_WEIGHT = 1.25
"""Weight of the prior relative to values (c_init of the papers)."""
PRIOR_WEIGHT_VISITS = 19652.0
"""Number of visits at which the prior's weight begins to grow (c_base of the papers)."""


class RootNoise(NamedTuple):
    """Exploration noise at the root of a PUCT search, which self-play adds."""

    fraction: float
    """Share of Dirichlet noise in the root's prior."""
    concentration: float
    """Concentration of the Dirichlet noise."""
    temperature: float
    """Moves are drawn by visits to the power of 1 / temperature. 0 takes the most visited action."""


NO_NOISE = RootNoise(fraction=0.0, concentration=1.0, temperature=0.0)


def puct_search(
    key: Key,
    root: EvaluatedPosition,
    legal: Bool[Array, " A"],
    model: Model,
    *,
    num_simulations: int,
    max_depth: int,
    noise: RootNoise,
) -> SearchResult:
    """Runs the PUCT search of AlphaZero from one position.

    Args:
        key: random key of all noise.
        root: the evaluated position, with very low logits for illegal actions.
        legal: True for each legal action.
        model: function that steps and evaluates copies of the position.
        num_simulations: number of simulations, at least 1.
        max_depth: maximum depth of the tree.
        noise: noise of self-play, or `NO_NOISE`.
    """
    noise_key, choice_key = jax.random.split(key)
    root = root._replace(logits=_noisy(noise_key, root.logits, legal, noise))

    def root_rule(node: Statistics) -> Int[Array, ""]:
        return best_action(jnp.where(legal, upper_bounds(node), -jnp.inf))

    def rule(node: Statistics) -> Int[Array, "..."]:
        return best_action(upper_bounds(node))

    node = run_search(
        root, model, root_rule=root_rule, rule=rule, num_simulations=num_simulations, max_depth=max_depth
    )
    weights = node.edges.visits / jnp.sum(node.edges.visits)
    if noise.temperature == 0:
        choice = best_action(weights)
    else:
        choice = jax.random.categorical(choice_key, jnp.log(weights) / noise.temperature).astype(jnp.int32)
    return SearchResult(choice, weights, node.value)


def upper_bounds(node: Statistics) -> Float[Array, "... A"]:
    """Returns the upper confidence bound of each action of a node.

    It is the action's value, mapped to [0, 1], plus the weighted prior, which is larger for actions with few
    visits.
    """
    edges = node.edges
    visited, node_value = edges.visits > 0, node.value[..., None]
    known = jnp.where(visited, edges.value, node_value)
    lowest = jnp.minimum(jnp.min(known, axis=-1, keepdims=True), node_value)
    highest = jnp.maximum(jnp.max(known, axis=-1, keepdims=True), node_value)
    value = (jnp.where(visited, edges.value, lowest) - lowest) / jnp.maximum(highest - lowest, 1e-8)
    visits = 1.0 + jnp.sum(edges.visits, axis=-1, keepdims=True)
    weight = PRIOR_WEIGHT + jnp.log((visits + PRIOR_WEIGHT_VISITS + 1.0) / PRIOR_WEIGHT_VISITS)
    bounds = value + jnp.sqrt(visits) * weight * edges.prior / (edges.visits + 1.0)
    return jnp.where(edges.prior > 0, bounds, -jnp.inf)


def _noisy(key: Key, logits: Float[Array, " A"], legal: Bool[Array, " A"], noise: RootNoise) -> Float[Array, " A"]:
    """Returns the logits of the prior mixed with Dirichlet noise over the legal actions."""
    if noise.fraction == 0:
        return logits
    gamma = jnp.where(legal, jax.random.gamma(key, noise.concentration, logits.shape), 0.0)
    share = gamma / jnp.maximum(jnp.sum(gamma), jnp.finfo(gamma.dtype).tiny)
    mixed = (1.0 - noise.fraction) * jax.nn.softmax(logits) + noise.fraction * share
    lowest = jnp.finfo(mixed.dtype)
    return jnp.where(legal, jnp.log(jnp.maximum(mixed, lowest.tiny)), lowest.min)
