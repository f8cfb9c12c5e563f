"""Runs a policy for a number of episodes: compiled for JAX environments, in processes for host ones.

Shape letter: `N` episodes, each in an environment of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment, Key, Memory
from rollmill.dataflow import Collector, Graph, Weights, step_one

MAX_STEPS = 100_000
"""An evaluation gives up on an episode that is longer than this."""

MAX_PROCESSES = 8


class Episodes(NamedTuple):
    """Finished episodes, one entry each."""

    returns: Float[np.ndarray, " N"]
    lengths: Int[np.ndarray, " N"]


class _Playing(NamedTuple):
    collector: Collector
    returns: Float[Array, " N"]
    lengths: Int[Array, " N"]
    done: Bool[Array, " N"]
    t: Int[Array, ""]


def evaluate(
    graph: Graph, weights: Weights, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> Episodes:
    """Plays whole episodes, one in each of as many environments, so that short ones do not count twice.

    Args:
        graph: the algorithm with its environment.
        weights: of the policy, as `graph.weights` gives them.
        episodes: how many.
        seed: of the environments and, where it is stochastic, of the policy.
        stochastic: draw actions as in training, instead of the most likely one.

    Raises:
        UsageError: if an episode does not end within `MAX_STEPS` steps.
    """
    _check_numbers(episodes, seed)
    policy = graph.policy if stochastic else graph.policy._replace(function=graph.greedy)
    play = jax.jit(partial(_play, graph._replace(policy=policy), episodes))
    returns, lengths, done = jax.device_get(play(weights, jax.random.key(seed)))
    if not done.all():
        raise _never_ends(int((~done).sum()), episodes)
    return Episodes(returns, lengths)


def _check_numbers(episodes: int, seed: int) -> None:
    if episodes < 1:
        raise UsageError(f"episodes={episodes} must be at least 1.")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must lie between 0 and 2**32 - 1.")


def _never_ends(count: int, episodes: int) -> UsageError:
    return UsageError(
        f"{count} of {episodes} episodes did not end within {MAX_STEPS} steps; put a time limit around the "
        "environment: rollmill.time_limit(env, max_steps)."
    )


def _play(graph: Graph, episodes: int, weights: Weights, key: Key) -> tuple[Array, Array, Array]:
    start_key, run_key = jax.random.split(key)
    step = jax.vmap(partial(step_one, graph, weights))

    def body(now: _Playing) -> _Playing:
        keys = jax.random.split(jax.random.fold_in(run_key, now.t), episodes)
        collector, steps = step(now.collector, keys)
        ends = (steps.terminated | steps.truncated) & ~now.done
        returns = jnp.where(ends, steps.info["episode_return"], now.returns)
        lengths = jnp.where(ends, steps.info["episode_length"], now.lengths)
        return _Playing(collector, returns, lengths, now.done | ends, now.t + 1)

    end = jax.lax.while_loop(
        lambda now: ~jnp.all(now.done) & (now.t < MAX_STEPS), body, _begin(graph, episodes, start_key)
    )
    return end.returns, end.lengths, end.done


def _begin(graph: Graph, episodes: int, key: Key) -> _Playing:
    index = jnp.arange(episodes, dtype=jnp.int32)
    start = jax.vmap(graph.start_environment)
    state, observation = start(jax.random.split(key, episodes), index % graph.loops.num_envs)
    mask = jax.vmap(graph.action_mask)(state)
    return _Playing(
        collector=Collector(index, state, observation, mask, start_memories(graph, episodes)),
        returns=jnp.zeros(episodes, jnp.float32),
        lengths=jnp.zeros(episodes, jnp.int32),
        done=jnp.zeros(episodes, bool),
        t=jnp.int32(0),
    )


def start_memories(graph: Graph, count: int) -> Memory:
    """The policy's memory at the start of `count` episodes; leaves `[count, ...]`."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), graph.start_memory())


# --- host environments --------------------------------------------------------------------------------


def evaluate_on_host(
    graph: Graph,
    weights: Weights,
    env: HostEnvironment,
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
) -> Episodes:
    """Plays whole episodes of a host environment, side by side in up to `MAX_PROCESSES` processes.

    Episodes are dealt out beforehand, an equal number to each process, so that short ones do not
    count more often. Arguments are those of `evaluate`.
    """
    _check_numbers(episodes, seed)
    num_envs = min(episodes, MAX_PROCESSES)
    quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    decide = jax.jit(
        jax.vmap(graph.policy.function if stochastic else graph.greedy, in_axes=(None, 0, 0, 0, None))
    )
    vector = env.make_vector(num_envs)
    try:
        return _play_on_host(partial(decide, weights), vector, start_memories(graph, num_envs), quota, seed)
    finally:
        vector.close()


def _play_on_host(
    decide: Callable,
    vector: gymnasium.vector.VectorEnv,
    memory: Memory,
    quota: Int[np.ndarray, " B"],
    seed: int,
) -> Episodes:
    returns, lengths = [], []
    running_return, running_length = np.zeros(quota.size), np.zeros(quota.size, int)
    fresh, key = memory, jax.random.key(seed)
    observation, _ = vector.reset(seed=seed)
    while quota.any():
        key, now = jax.random.split(key)
        decision = decide(jax.random.split(now, quota.size), memory, _narrow(observation), ())
        observation, reward, terminated, truncated, _ = vector.step(_clip(vector, decision.action))
        running_return, running_length = running_return + reward, running_length + 1
        done = terminated | truncated
        if running_length.max() >= MAX_STEPS:
            raise _never_ends(int(quota.sum()), len(returns) + int(quota.sum()))
        for i in np.flatnonzero(done & (quota > 0)):
            returns.append(running_return[i])
            lengths.append(running_length[i])
        quota = quota - (done & (quota > 0))
        running_return, running_length = np.where(done, 0, running_return), np.where(done, 0, running_length)
        memory = _reset_where(done, fresh, decision.memory)
    return Episodes(np.asarray(returns, np.float32), np.asarray(lengths, np.int32))


def _narrow(observation: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
    """Gymnasium's 64-bit observations as JAX's 32-bit ones."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), observation)


def _clip(vector: gymnasium.vector.VectorEnv, action: Array) -> Any:
    space = vector.action_space
    chosen = np.asarray(action)
    return np.clip(chosen, space.low, space.high) if isinstance(space, gymnasium.spaces.Box) else chosen


def _reset_where(done: Bool[np.ndarray, " B"], fresh: Memory, memory: Memory) -> Memory:
    broadcast = lambda leaf: done.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda new, old: jnp.where(broadcast(old), new, old), fresh, memory)
