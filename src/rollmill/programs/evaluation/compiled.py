"""Evaluates policies on JAX environments, with all episodes in one compiled program.

Shape letters: `N` episodes, each in its own environment, and `T` steps.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from rollmill.core.errors import CannotFuse, NonFiniteError
from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Hyperparameters, Weights, step_one
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import program_options
from rollmill.programs.evaluation.episodes import (
    CHUNK,
    MAX_STEPS,
    Advance,
    EvaluationEpisodes,
    Evaluator,
    Playing,
    check_numbers,
    never_ends,
    start_memories,
    with_outcome,
)

LOOKS_AT_EACH_STEP = ("cpu",)
"""Platforms on which it costs nothing to check after each step whether all episodes have ended."""

BATCH_BYTES = 2**28
"""Maximum bytes of environment states in one batch of episodes. A step needs a few times as much memory."""

MAX_AT_ONCE = 2**16
"""Maximum number of environments that play side by side."""


def evaluate(
    graph: Graph, weights: Weights, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> EvaluationEpisodes:
    """Plays whole episodes with a policy, each in its own environment, so that all episodes count equally.

    `BATCH_BYTES` limits the number of concurrent episodes. Compiled programs are cached, so another evaluation of
    the same graph compiles nothing.

    Args:
        graph: the algorithm with its environment.
        weights: weights of the policy, as returned by `graph.weights`.
        episodes: number of episodes.
        seed: seed of the environments and of a stochastic policy.
        stochastic: True to draw actions as in training, False for the most likely actions.

    Raises:
        UsageError: an episode does not end within `MAX_STEPS` steps.
    """
    return evaluator(graph, weights, episodes=episodes, seed=seed, stochastic=stochastic)(weights)


def evaluator(
    graph: Graph,
    weights: PyTree[Array | np.ndarray | jax.ShapeDtypeStruct],
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
    backend: Any = None,
) -> Evaluator:
    """Compiles `evaluate` for weights with these shapes, and returns a function of the weights.

    See `evaluate` for arguments and errors. If `backend` (a `fusion.Backend`) can compile the steps into a kernel,
    the evaluation uses this kernel. Otherwise, or without a backend, XLA computes the steps.
    """
    episodes, seed = check_numbers(episodes, seed)
    graph = graph._replace(policy=graph.deployed_policy(stochastic=stochastic))
    enable_compilation_cache()
    batch, key = min(episodes, most_at_once(graph)), jax.random.key(seed)
    parameters = final_parameters(graph)

    def play_with(advance: Advance) -> Evaluator:
        play = jax.jit(partial(_play, graph, batch, advance)).lower(weights, key, np.int32(0), parameters)
        return partial(_play_all, graph, play.compile(program_options()), key, batch, episodes)

    # A kernel relies on properties that hold for the environments of a run. Later batches, and environments beyond
    # `num_envs`, start with the index of another environment.
    if backend is not None and episodes == batch <= graph.loops.num_envs:
        from rollmill.programs.evaluation.fused import fused_steps

        with suppress(CannotFuse):
            return play_with(fused_steps(graph, backend, batch))
    return play_with(partial(_advance_by_steps, graph))


def _play_all(
    graph: Graph, play: Callable, key: Key, batch: int, episodes: int, weights: Weights
) -> EvaluationEpisodes:
    played, parameters = [], final_parameters(graph)
    for first in range(0, episodes, batch):
        own_key = jax.random.fold_in(key, first) if first else key
        *outcome, done = jax.device_get(play(weights, own_key, np.int32(first % graph.loops.num_envs), parameters))
        returns = outcome[0]
        if not done.all():
            raise never_ends(int((~done).sum()), batch)
        if not np.isfinite(returns).all():
            raise NonFiniteError(
                f"the return of episode {first + int(np.argmin(np.isfinite(returns)))} of the evaluation is "
                f"{returns[~np.isfinite(returns)][0]}, because the environment returned a reward that is not "
                "finite. hint: rollmill.check_environment finds the step."
            )
        played.append(EvaluationEpisodes(*outcome))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:episodes], *played)


def most_at_once(graph: Graph) -> int:
    """Returns the number of episodes whose environment states fit into `BATCH_BYTES`."""
    one = jax.eval_shape(partial(begin, graph, 1), jax.random.key(0), np.int32(0))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one)]
    return int(np.clip(BATCH_BYTES // sum(sizes), 1, MAX_AT_ONCE))


def final_parameters(graph: Graph) -> dict[str, np.ndarray]:
    """Returns the environment parameters that are program inputs, with the values at the end of
    their schedules.
    """
    numbers = {name: value for name, value in graph.parameters.items() if name != "steps_done"}
    return {name: np.asarray(value, np.float32) for name, value in numbers.items()}


def _play(
    graph: Graph,
    episodes: int,
    advance: Advance,
    weights: Weights,
    key: Key,
    first: Int[Array, ""],
    parameters: Hyperparameters,
) -> tuple[Array, Array, dict[str, Array], Array]:
    start_key, run_key = jax.random.split(key)

    def chunk(now: Playing) -> Playing:
        after = advance(weights, now, jax.random.fold_in(run_key, now.chunks))
        return after._replace(chunks=now.chunks + 1)

    end = jax.lax.while_loop(
        lambda now: ~jnp.all(now.done) & (now.chunks < MAX_STEPS // CHUNK),
        chunk,
        _with_agents(graph, weights, begin(graph, episodes, start_key, first, parameters)),
    )
    return end.returns, end.lengths, end.agent_returns, end.done


def _with_agents(graph: Graph, weights: Weights, now: Playing) -> Playing:
    """Adds a return of 0 for each agent kind."""
    first = jax.tree.map(lambda leaf: leaf[0], now.collector)
    _, step = jax.eval_shape(partial(step_one, graph, weights), first, jax.random.key(0), np.int32(0))
    kinds = step.info.get("agent_returns", {})
    return now._replace(agent_returns={name: jnp.zeros_like(now.returns) for name in kinds})


def begin(
    graph: Graph, episodes: int, key: Key, first: Int[Array, ""], parameters: Hyperparameters | None = None
) -> Playing:
    """Starts `episodes` episodes, in environments with consecutive indices from `first` on."""
    index, held = first + jnp.arange(episodes, dtype=jnp.int32), (parameters,) if parameters else ()
    start = jax.vmap(lambda key, index: graph.start_environment(key, index, *held))
    state, observation = start(jax.random.split(key, episodes), index % graph.loops.num_envs)
    mask = jax.vmap(graph.action_mask)(state)
    return Playing(
        collector=Collector(index, state, observation, mask, start_memories(graph.start_memory, episodes)),
        returns=jnp.zeros(episodes, jnp.float32),
        lengths=jnp.zeros(episodes, jnp.int32),
        agent_returns={},
        done=jnp.zeros(episodes, bool),
        chunks=jnp.int32(0),
    )


# --- by XLA -------------------------------------------------------------------------------------------


def _advance_by_steps(graph: Graph, weights: Weights, now: Playing, key: Key) -> Playing:
    step_each = jax.vmap(partial(step_one, graph, weights), in_axes=(0, 0, None))
    # keys are derived as in `fused_collect`
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, now.collector.index)

    def step(t: Int[Array, ""], now: Playing) -> Playing:
        collector, steps = step_each(now.collector, keys, t)
        ends = (steps.terminated | steps.truncated) & ~now.done
        return with_outcome(now, ends, steps.info)._replace(collector=collector)

    if jax.default_backend() not in LOOKS_AT_EACH_STEP:
        return jax.lax.fori_loop(0, CHUNK, step, now)
    return jax.lax.while_loop(
        lambda carry: ~jnp.all(carry[1].done) & (carry[0] < CHUNK),
        lambda carry: (carry[0] + 1, step(*carry)),
        (jnp.int32(0), now),
    )[1]
