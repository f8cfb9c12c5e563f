"""Records the transitions of the episodes that an evaluation plays.

Shape letters: `T` steps of a chunk, `N` episodes, each in its own environment.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment, HostStep, Key
from rollmill.dataflow import Graph, Weights, step_one
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import program_options
from rollmill.programs.evaluation.compiled import begin, final_parameters, most_at_once
from rollmill.programs.evaluation.episodes import (
    CHUNK,
    MAX_STEPS,
    EvaluationEpisodes,
    Playing,
    check_numbers,
    never_ends,
    with_outcome,
)
from rollmill.programs.evaluation.host_environments import evaluator_on_host

MAX_BYTES = 2**32
"""Maximum size of a recording in bytes, all of which is held in memory."""

SINGLE_AGENT_ONLY = "record supports only single-agent environments."


class Recording(NamedTuple):
    """The episodes of an evaluation and their transitions."""

    episodes: EvaluationEpisodes
    transitions: dict[str, Any]
    """Arrays, or trees of arrays, by name, with one row per transition, episode after episode."""


def record_episodes(
    graph: Graph, weights: Weights, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> Recording:
    """Plays the same episodes as `evaluate`, and returns their results and transitions.

    Raises a `UsageError` if an episode does not end within `MAX_STEPS` steps, or if the transitions exceed
    `MAX_BYTES`.
    """
    episodes, seed = check_numbers(episodes, seed)
    graph = graph._replace(policy=graph.deployed_policy(stochastic=stochastic))
    enable_compilation_cache()
    batch, key = min(episodes, most_at_once(graph)), jax.random.key(seed)
    advance = jax.jit(partial(_advance, graph), compiler_options=program_options())
    start = jax.jit(partial(begin, graph, batch))
    played: list[Recording] = []
    for first in range(0, episodes, batch):
        start_key, run_key = jax.random.split(jax.random.fold_in(key, first) if first else key)
        now = start(start_key, jnp.int32(first % graph.loops.num_envs), final_parameters(graph))
        taken = min(batch, episodes - first)
        played.append(_play(advance, weights, now, run_key, taken))
        check_size(played)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *played)


def record_on_host(
    graph: Graph, weights: Weights, env: HostEnvironment, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> Recording:
    """Plays the same episodes as `evaluate_on_host`, and returns their results and transitions.

    Transitions are sorted by copy of the environment, and then by time. See `record_episodes` for the errors.
    """
    if env.agents:
        raise UsageError(SINGLE_AGENT_ONLY)
    rows: list[tuple[dict[str, Any], Bool[np.ndarray, " N"]]] = []

    def keep(
        before: HostStep, action: PyTree[np.ndarray], after: HostStep, counted: Bool[np.ndarray, " N"]
    ) -> None:
        mask = {"action_mask": before.info["action_mask"]} if "action_mask" in before.info else {}
        outcome = {name: np.copy(getattr(after, name)) for name in ("reward", "terminated", "truncated")}
        rows.append(({"observation": before.observation, "action": action, **outcome, **mask}, counted))

    playing = evaluator_on_host(graph, env, episodes=episodes, seed=seed, stochastic=stochastic, keep=keep)
    played = playing(weights)
    check_size(rows)
    steps, counted = jax.tree.map(lambda *parts: np.stack(parts, axis=1), *rows)
    return Recording(played, jax.tree.map(lambda leaf: leaf[counted], steps))


def check_size(parts: Any) -> None:
    """Raises a `UsageError` if the arrays in `parts` exceed `MAX_BYTES`."""
    if sum(leaf.nbytes for leaf in jax.tree.leaves(parts)) > MAX_BYTES:
        raise UsageError(f"the recording has more than {MAX_BYTES:,} bytes. hint: use fewer --episodes.")


def _play(advance: Any, weights: Weights, now: Playing, key: Key, count: int) -> Recording:
    """Plays a batch to the end, and returns its first `count` episodes."""
    chunks = []
    while not now.done[:count].all():
        if len(chunks) == MAX_STEPS // CHUNK:
            raise never_ends(int((~now.done[:count]).sum()), count)
        now, steps, counted = advance(weights, now, jax.random.fold_in(key, len(chunks)))
        chunks.append(jax.device_get((steps, counted)))
        check_size(chunks)
    steps, counted = jax.tree.map(lambda *parts: np.concatenate(parts)[:, :count].swapaxes(0, 1), *chunks)
    returns, lengths = jax.device_get((now.returns[:count], now.lengths[:count]))
    return Recording(EvaluationEpisodes(returns, lengths, {}), jax.tree.map(lambda leaf: leaf[counted], steps))


def _advance(
    graph: Graph, weights: Weights, now: Playing, key: Key
) -> tuple[Playing, dict[str, Any], Bool[Array, "T N"]]:
    """Plays a chunk. Returns its transitions `[T, N, ...]`, and which belong to an episode that had not ended."""
    step_each = jax.vmap(partial(step_one, graph, weights), in_axes=(0, 0, None))
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, now.collector.index)

    def step(now: Playing, t: Int[Array, ""]) -> tuple[Playing, Any]:
        collector, steps = step_each(now.collector, keys, t)
        if "agent_returns" in steps.info:
            raise UsageError(SINGLE_AGENT_ONLY)
        ends = (steps.terminated | steps.truncated) & ~now.done
        return with_outcome(now, ends, steps.info)._replace(collector=collector), (transition(steps), ~now.done)

    now, (steps, counted) = jax.lax.scan(step, now, jnp.arange(CHUNK))
    return now, steps, counted


def transition(steps: Any) -> dict[str, Any]:
    """Returns the parts of environment steps that a recording keeps, by name."""
    names = ("observation", "action", "reward", "terminated", "truncated")
    kept = {name: getattr(steps, name) for name in names}
    return kept if isinstance(steps.action_mask, tuple) else {**kept, "action_mask": steps.action_mask}
