"""Runs a policy for a number of episodes: compiled for JAX environments, step by step for host ones.

Shape letters: `N` episodes, each in an environment of its own; `B` copies of a host environment.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.fields import fit
from rollmill.core.jax_settings import check_compiled
from rollmill.core.types import HostEnvironment, HostVector, Key, Memory
from rollmill.dataflow import Collector, Graph, Weights, step_one
from rollmill.execution.program.cache import EXACT_PRECISION, enable_compilation_cache

MAX_STEPS = 100_000
"""An evaluation gives up on an episode that is longer than this."""

STEPS_AT_ONCE = {"gpu": 16}
"""Steps between two looks at whether all episodes have ended, for which a GPU waits for its host.

They divide `MAX_STEPS`, and change no result: an episode that has ended counts once.
"""

MAX_EPISODES = 10_000_000
"""More say nothing that these do not."""

BATCH_BYTES = 2**28
"""Bytes of environment states that one batch of episodes may hold; a step needs a few times as much."""

MAX_AT_ONCE = 2**16
"""Environments that play side by side at most."""

MAX_COPIES = 8
"""Copies of a host environment that play side by side."""


class EvaluationEpisodes(NamedTuple):
    """Finished episodes, one entry each."""

    returns: Float[np.ndarray, " N"]
    lengths: Int[np.ndarray, " N"]


class _Playing(NamedTuple):
    collector: Collector
    returns: Float[Array, " N"]
    lengths: Int[Array, " N"]
    done: Bool[Array, " N"]
    t: Int[Array, ""]


Evaluator: TypeAlias = Callable[[Weights], EvaluationEpisodes]
"""Plays the same episodes by the policy of any weights; compiled already."""


def evaluate(
    graph: Graph, weights: Weights, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> EvaluationEpisodes:
    """Plays whole episodes, one in each of as many environments, so that short ones do not count twice.

    As many are played at once as `BATCH_BYTES` hold. Programs are kept in the compilation cache, so that another
    evaluation of the same graph compiles nothing.

    Args:
        graph: the algorithm with its environment.
        weights: weights of the policy, as `graph.weights` gives them.
        episodes: how many.
        seed: seed of the environments and, where it is stochastic, of the policy.
        stochastic: draw actions as in training, instead of the most likely one.

    Raises:
        UsageError: if an episode does not end within `MAX_STEPS` steps.
    """
    return evaluator(graph, weights, episodes=episodes, seed=seed, stochastic=stochastic)(weights)


def evaluator(
    graph: Graph,
    weights: PyTree[Array | np.ndarray | jax.ShapeDtypeStruct],
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
) -> Evaluator:
    """Compiles `evaluate` for weights of these shapes; the other arguments and errors are those of `evaluate`."""
    episodes, seed = _check_numbers(episodes, seed)
    policy = graph.policy if stochastic else graph.greedy
    enable_compilation_cache()
    batch = min(episodes, _most_at_once(graph))
    key = jax.random.key(seed)
    play = jax.jit(partial(_play, graph._replace(policy=policy), batch)).lower(weights, key, np.int32(0))
    return partial(_play_all, graph, play.compile(EXACT_PRECISION), key, batch, episodes)


def _play_all(
    graph: Graph, play: Callable, key: Key, batch: int, episodes: int, weights: Weights
) -> EvaluationEpisodes:
    played = []
    for first in range(0, episodes, batch):
        own_key = jax.random.fold_in(key, first) if first else key
        returns, lengths, done = jax.device_get(play(weights, own_key, np.int32(first % graph.loops.num_envs)))
        if not done.all():
            raise _never_ends(int((~done).sum()), batch)
        played.append((returns, lengths))
    returns, lengths = (np.concatenate(parts)[:episodes] for parts in zip(*played, strict=True))
    return EvaluationEpisodes(returns, lengths)


def _most_at_once(graph: Graph) -> int:
    """Episodes whose states fit into `BATCH_BYTES`."""
    one = jax.eval_shape(partial(_begin, graph, 1), jax.random.key(0), np.int32(0))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one)]
    return int(np.clip(BATCH_BYTES // sum(sizes), 1, MAX_AT_ONCE))


def _check_numbers(episodes: int, seed: int) -> tuple[int, int]:
    """Both as whole numbers."""
    check_compiled()
    episodes, seed = fit("episodes", int, episodes), fit("seed", int, seed)
    if episodes < 1:
        raise UsageError(f"episodes={episodes} must be at least 1.")
    if episodes > MAX_EPISODES:
        raise UsageError(f"episodes={episodes} is more than {MAX_EPISODES}. hint: 100 to 10,000 give a mean.")
    check_seed(seed)
    return episodes, seed


def check_seed(seed: int) -> None:
    """Checks the seed of an evaluation.

    Raises:
        UsageError: it is no number of 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must lie between 0 and 2**32 - 1.")


def _never_ends(count: int, episodes: int) -> UsageError:
    return UsageError(
        f"{count} of {episodes} episodes did not end within {MAX_STEPS} steps; put a time limit around the "
        "environment: rollmill.time_limit(env, max_steps)."
    )


def _play(
    graph: Graph, episodes: int, weights: Weights, key: Key, first: Int[Array, ""]
) -> tuple[Array, Array, Array]:
    start_key, run_key = jax.random.split(key)
    step = jax.vmap(partial(step_one, graph, weights), in_axes=(0, 0, None))
    keys = jax.random.split(run_key, episodes)

    def body(now: _Playing) -> _Playing:
        collector, steps = step(now.collector, keys, now.t)
        ends = (steps.terminated | steps.truncated) & ~now.done
        returns = jnp.where(ends, steps.info["episode_return"], now.returns)
        lengths = jnp.where(ends, steps.info["episode_length"], now.lengths)
        return _Playing(collector, returns, lengths, now.done | ends, now.t + 1)

    steps_at_once = STEPS_AT_ONCE.get(jax.default_backend(), 1)
    end = jax.lax.while_loop(
        lambda now: ~jnp.all(now.done) & (now.t < MAX_STEPS),
        lambda now: jax.lax.fori_loop(0, steps_at_once, lambda _, step: body(step), now),
        _begin(graph, episodes, start_key, first),
    )
    return end.returns, end.lengths, end.done


def _begin(graph: Graph, episodes: int, key: Key, first: Int[Array, ""]) -> _Playing:
    index = first + jnp.arange(episodes, dtype=jnp.int32)
    start = jax.vmap(graph.start_environment)
    state, observation = start(jax.random.split(key, episodes), index % graph.loops.num_envs)
    mask = jax.vmap(graph.action_mask)(state)
    return _Playing(
        collector=Collector(index, state, observation, mask, start_memories(graph.start_memory, episodes)),
        returns=jnp.zeros(episodes, jnp.float32),
        lengths=jnp.zeros(episodes, jnp.int32),
        done=jnp.zeros(episodes, bool),
        t=jnp.int32(0),
    )


def start_memories(start_memory: Callable[[], Memory], count: int) -> Memory:
    """The policy's memory at the start of `count` episodes; leaves `[count, ...]`."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), start_memory())


def where_rows(condition: Bool[Array, " N"], chosen: PyTree, other: PyTree) -> PyTree:
    """Rows of `chosen` where the condition holds, and of `other` elsewhere; leaves `[N, ...]`."""
    broadcast = lambda leaf: condition.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda one, two: jnp.where(broadcast(two), one, two), chosen, other)


# --- host environments --------------------------------------------------------------------------------


def evaluate_on_host(
    graph: Graph,
    weights: Weights,
    env: HostEnvironment,
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
) -> EvaluationEpisodes:
    """Plays whole episodes of a host environment, side by side in up to `MAX_COPIES` copies of it.

    Episodes are dealt out beforehand, an equal number to each copy, so that short ones do not count more
    often. Arguments are those of `evaluate`.

    Raises:
        UsageError: if an episode does not end within `MAX_STEPS` steps.
        ContractError: if the environment raises; its line is shown.
    """
    return evaluator_on_host(graph, env, episodes=episodes, seed=seed, stochastic=stochastic)(weights)


def evaluator_on_host(
    graph: Graph, env: HostEnvironment, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> Evaluator:
    """`evaluate_on_host` for any weights; its policy is compiled once, at the first call."""
    episodes, seed = _check_numbers(episodes, seed)
    num_envs = min(episodes, MAX_COPIES)
    quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    decide = jax.jit(jax.vmap(graph.policy if stochastic else graph.greedy, in_axes=(None, 0, 0, 0, 0)))

    def play(weights: Weights) -> EvaluationEpisodes:
        vector = env.start(range(num_envs), seed=seed)
        try:
            memory = start_memories(graph.start_memory, num_envs)
            return _play_on_host(env.name, vector, partial(decide, weights), memory, quota, seed)
        finally:
            vector.close()

    return play


def _play_on_host(
    name: str,
    vector: HostVector,
    decide: Callable,
    memory: Memory,
    quota: Int[np.ndarray, " B"],
    seed: int,
) -> EvaluationEpisodes:
    returns, lengths = [], []
    fresh, key = memory, jax.random.key(seed)
    now = vector.reset()
    _raise_failures(name, vector)
    while quota.any():
        key, step_key = jax.random.split(key)
        mask = now.info.get("action_mask", ())
        decision = decide(jax.random.split(step_key, quota.size), memory, now.observation, mask)
        now = vector.step(jax.device_get(decision.action))
        _raise_failures(name, vector)
        if now.info["episode_length"].max() >= MAX_STEPS:
            raise _never_ends(int(quota.sum()), len(returns) + int(quota.sum()))
        done = now.terminated | now.truncated
        counts = done & (quota > 0)
        returns.extend(now.info["episode_return"][counts])
        lengths.extend(now.info["episode_length"][counts])
        quota = quota - counts
        memory = where_rows(jnp.asarray(done), fresh, decision.memory)
    return EvaluationEpisodes(np.asarray(returns, np.float32), np.asarray(lengths, np.int32))


def _raise_failures(name: str, vector: HostVector) -> None:
    """An episode that broke off has no return, and a mean over the others would be one of easy episodes."""
    for failure in vector.drain_failures():
        raise ContractError(f"{name}: {failure.doing} raised {failure.error}\n  at {failure.line}")
