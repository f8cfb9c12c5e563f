"""Evaluates policies on host environments, which Python steps one after another.

Shape letters: `B` copies of an environment.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PyTree

from rollmill.core.errors import ContractError, EnvironmentFailed
from rollmill.core.types import HostEnvironment, HostStep, HostVector, Memory
from rollmill.dataflow import Graph, Weights
from rollmill.envs.host import EVALUATION
from rollmill.programs.compiler_options import program_options
from rollmill.programs.evaluation.episodes import (
    MAX_STEPS,
    EvaluationEpisodes,
    Evaluator,
    check_numbers,
    never_ends,
    start_memories,
    where_rows,
)

MAX_COPIES = 8
"""Maximum number of copies of a host environment in one evaluation."""

Keep: TypeAlias = Callable[[HostStep, PyTree[np.ndarray], HostStep, Bool[np.ndarray, " B"]], None]
"""Function that receives each step: `(step before, actions, step after, copies whose episode counts)`."""


def evaluate_on_host(
    graph: Graph, weights: Weights, env: HostEnvironment, *, episodes: int, seed: int = 0, stochastic: bool = False
) -> EvaluationEpisodes:
    """Plays whole episodes with a policy, in up to `MAX_COPIES` copies of a host environment.

    Each copy plays the same number of episodes, fixed in advance, so that short episodes do not count more often.
    The seeds of the environments differ from the seeds in a training run with the same `seed`. See `evaluate` for
    the arguments. Raises a `UsageError` if an episode does not end within `MAX_STEPS` steps, and a `ContractError`
    with the environment's source line if the environment raises an error.
    """
    return evaluator_on_host(graph, env, episodes=episodes, seed=seed, stochastic=stochastic)(weights)


def evaluator_on_host(
    graph: Graph,
    env: HostEnvironment,
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
    keep: Keep | None = None,
) -> Evaluator:
    """Returns `evaluate_on_host` as a function of the weights. The policy is compiled once, at the first call.

    If `keep` is given, it is called with each step of all copies.
    """
    episodes, seed = check_numbers(episodes, seed)
    quota = quotas(episodes)
    num_envs = quota.size
    decide_all = jax.vmap(graph.deployed_policy(stochastic=stochastic), in_axes=(None, 0, 0, 0, 0))
    decide = jax.jit(decide_all, compiler_options=program_options())

    def play(weights: Weights) -> EvaluationEpisodes:
        vector = env.start(range(num_envs), seed=seed, generation=EVALUATION)
        try:
            memory = start_memories(graph.start_memory, num_envs)
            return _play_on_host(env.name, vector, partial(decide, weights), memory, quota, seed, keep)
        except EnvironmentFailed as error:  # in training, this error ends the run and keeps its checkpoint
            raise ContractError(str(error)) from error
        finally:
            vector.close()

    return play


def quotas(episodes: int) -> Int[np.ndarray, " B"]:
    """Returns the number of episodes that each copy of the environment plays."""
    num_envs = min(episodes, MAX_COPIES)
    return np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)


def _play_on_host(
    name: str,
    vector: HostVector,
    decide: Callable,
    memory: Memory,
    quota: Int[np.ndarray, " B"],
    seed: int,
    keep: Keep | None,
) -> EvaluationEpisodes:
    played: list[EvaluationEpisodes] = []
    episodes = int(quota.sum())
    fresh, key = memory, jax.random.key(seed)
    now = vector.reset()
    _raise_failures(name, vector)
    while quota.any():
        key, step_key = jax.random.split(key)
        mask = now.info.get("action_mask", ())
        decision = decide(jax.random.split(step_key, quota.size), memory, now.observation, mask)
        before, action = now, jax.device_get(decision.action)
        if keep is not None:  # a vector may write the next step into the same arrays, so they are copied
            before = jax.tree.map(np.copy, before)
        now = vector.step(action)
        _raise_failures(name, vector)
        if now.info["episode_length"].max() >= MAX_STEPS:
            raise never_ends(int(quota.sum()), episodes)
        if keep is not None:
            keep(before, action, now, quota > 0)
        done = now.terminated | now.truncated
        counts = done & (quota > 0)
        if counts.any():
            played.append(_read_ended(now.info, counts))
        quota = quota - counts
        memory = where_rows(jnp.asarray(done), fresh, decision.memory)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *played)


def _read_ended(info: Mapping[str, Any], which: Bool[np.ndarray, " B"]) -> EvaluationEpisodes:
    """Returns the episodes that have ended in these copies."""
    agents = {kind: returns[which] for kind, returns in info.get("agent_returns", {}).items()}
    return EvaluationEpisodes(info["episode_return"][which], info["episode_length"][which], agents)


def _raise_failures(name: str, vector: HostVector) -> None:
    """Raises a failure: a broken episode has no return, and a mean over the others would favour easy episodes."""
    for failure in vector.drain_failures():
        raise ContractError(f"{name}: {failure.doing} raised {failure.error}\n  at {failure.line}")
