"""Inputs on which an exported policy is compared with the original, as they occur in episodes.

Shape letters: `E` environments, `T` steps.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.algorithms.agent_views import AgentView
from rollmill.core.spaces import sample
from rollmill.core.types import Key, Memory, Observation
from rollmill.dataflow import ActionMask, Decision, Graph, start_one, step_one
from rollmill.policies.policy import LoadedRun
from rollmill.policies.policy_arguments import mask_struct
from rollmill.tree_search.positions import Position

ENVIRONMENTS = 40


class Situations(NamedTuple):
    """Inputs of a policy, with one leading axis over examples."""

    observation: PyTree[np.ndarray]
    mask: PyTree[np.ndarray]
    """Action masks, or `()` if the environment has no masks."""
    memory: PyTree[np.ndarray]


def situations(loaded: LoadedRun, count: int, *, seed: int = 0) -> Situations:
    """Returns inputs for a comparison. Half of the observations come from rollouts with random actions.

    The other half are samples of the observation space, with random masks of legal actions, and with memories that
    follow other sampled observations. For a host environment, all observations are sampled.
    """
    graph = loaded.graph
    if graph.outputs.searches:
        alone = partial(_draw_alone, graph)
        graph = graph._replace(policy=alone, greedy=alone)
    drawn, rollout = partial(_random, graph, mask_struct(graph)), partial(_rollout, graph)
    ways = [rollout, drawn] if graph.host is None else [drawn]
    steps = -(-count // (ENVIRONMENTS * len(ways)))
    keys = jax.random.split(jax.random.key(seed), ENVIRONMENTS)
    index = jnp.arange(ENVIRONMENTS, dtype=jnp.int32) % graph.loops.num_envs
    found = [
        jax.jit(jax.vmap(partial(way, steps), in_axes=(None, 0, 0)))(loaded.weights, keys, index) for way in ways
    ]
    flat = lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:])
    rows = jax.tree.map(lambda *leaves: np.concatenate([flat(leaf) for leaf in leaves])[:count], *found)
    return Situations(*rows)


def _draw_alone(
    graph: Graph, weights: PyTree, key: Key, memory: Memory, observation: Observation, known: ActionMask
) -> Decision:
    """Returns an action of the network of a search, without searching."""
    assert graph.outputs.distribution is not None
    found = graph.outputs.distribution(weights, memory, observation, _legal(known))
    return Decision(found.sample(key), memory, ())


def _rollout(graph: Graph, steps: int, weights: PyTree, key: Key, index: Array) -> tuple[PyTree, ...]:
    """Returns observations, legal actions and memories of a rollout of ONE environment, `[T, ...]`."""

    def step(now: Any, t: Array) -> tuple[Any, tuple[PyTree, ...]]:
        observation = now.observation.agents if isinstance(now.observation, AgentView) else now.observation
        return step_one(graph, weights, now, key, t)[0], (observation, _legal(now.action_mask), now.memory)

    return jax.lax.scan(step, start_one(graph, key, index), jnp.arange(steps))[1]


def _random(
    graph: Graph, masks: PyTree, steps: int, weights: PyTree, key: Key, index: Array
) -> tuple[PyTree, ...]:
    """Draws random observations and legal actions, and returns them with the resulting memories."""

    def step(memory: Memory, key: Key) -> tuple[Memory, tuple[PyTree, ...]]:
        observation_key, mask_key = jax.random.split(key)
        observation = sample(observation_key, graph.observation_space)
        mask = jax.tree.map(partial(_random_mask, mask_key), masks)
        return graph.greedy(weights, key, memory, observation, mask).memory, (observation, mask, memory)

    return jax.lax.scan(step, graph.start_memory(), jax.random.split(key, steps))[1]


def _random_mask(key: Key, mask: jax.ShapeDtypeStruct) -> Array:
    """Makes the first action always legal, so that there is one."""
    first = jnp.broadcast_to(jnp.arange(mask.shape[-1]) == 0, mask.shape)
    return first | jax.random.bernoulli(key, 0.7, mask.shape)


def _legal(known: ActionMask) -> ActionMask:
    return known.action_mask if isinstance(known, Position) else known
