"""A policy compiled for batches of every padded size. The memories of its sessions stay on the device.

Shape letters: `N` observations of a batch, including padding, and `S` sessions.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Int, PyTree, UInt32

from rollmill.algorithms import clip_to_space
from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import Memory
from rollmill.dataflow import Graph, Weights
from rollmill.gpus.jax_settings import check_compiled
from rollmill.policies.policy import LoadedRun
from rollmill.policies.policy_arguments import mask_struct
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import program_options
from rollmill.programs.evaluation.episodes import check_seed, start_memories
from rollmill.serving.batching import padded_sizes


class PolicyRows(NamedTuple):
    """A batch of observations with their memories and legal actions, with leaves `[N, ...]`."""

    observation: PyTree[np.ndarray]
    mask: PyTree[np.ndarray]
    """Action masks, or `()` if the environment has no masks."""
    slot: Int[np.ndarray, " N"]
    """Row of each observation's memory. It equals `sessions` for padding, and for policies without memory."""
    fresh: Bool[np.ndarray, " N"]
    """True for the first observation of an episode."""


class BatchedPolicy:
    """The policy of a run, compiled for batches of at most `max_batch` observations, a power of two.

    `sessions` is the number of sessions of a recurrent policy. A `stochastic` policy samples its actions with the
    seed, instead of taking the most likely ones. Raises a `UsageError` if the policy needs more than observations
    and legal actions, as a search does.
    """

    def __init__(
        self, loaded: LoadedRun, *, max_batch: int, sessions: int, stochastic: bool = False, seed: int = 0
    ) -> None:
        check_compiled()
        check_seed(seed)
        self.graph, self.iteration = loaded.graph, loaded.iteration
        self.observation_space: spaces.Space = self.graph.observation_space
        self.action_space: spaces.Space = self.graph.action_space
        self.mask_struct = mask_struct(self.graph)
        self.max_batch, self.sessions, self.stochastic = max_batch, sessions, stochastic
        self.recurrent = bool(jax.tree.leaves(self.graph.start_memory()))
        self._weights = jax.device_put(loaded.weights)
        self._decide = partial(_decide, self.graph, stochastic, seed)
        self._memories: Memory = ()
        self.reset_memories()
        self._batches = 0
        try:
            jax.eval_shape(self._decide, self._weights, np.uint32(0), self._memories, self._example(1))
        except UsageError as error:
            raise UsageError(
                f"this policy cannot be served, because clients send only observations and legal actions: {error}"
            ) from error
        self._programs: dict[int, Any] = {}

    def compile(self) -> None:
        """Compiles the program for every batch size, and runs each once."""
        enable_compilation_cache()
        decide = jax.jit(self._decide, donate_argnums=2, compiler_options=program_options())
        for size in padded_sizes(self.max_batch):
            example = self._example(size)
            lowered = decide.lower(self._weights, np.uint32(0), self._memories, example)
            self._programs[size] = lowered.compile()
            self(example)

    def __call__(self, rows: PolicyRows) -> PyTree[np.ndarray]:
        """Returns the actions of a padded batch, with leaves `[N, ...]`, inside the bounds of the action space."""
        self._batches += 1
        program = self._programs[rows.slot.size]
        actions, self._memories = program(
            self._weights, np.uint32(self._batches & 0xFFFFFFFF), self._memories, rows
        )
        return jax.device_get(actions)

    @property
    def num_scalars(self) -> int:
        """Number of scalars in one observation and its action mask."""
        return sum(leaf.size for leaf in jax.tree.leaves((struct(self.observation_space), self.mask_struct)))

    def reset_memories(self) -> None:
        """Resets the memories of all sessions, for example after a failure that may have destroyed them."""
        self._memories = start_memories(self.graph.start_memory, self.sessions + 1) if self.recurrent else ()

    def _example(self, size: int) -> PolicyRows:
        zeros = lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype)
        ones = lambda leaf: np.ones((size, *leaf.shape), leaf.dtype)
        return PolicyRows(
            jax.tree.map(zeros, struct(self.observation_space)),
            jax.tree.map(ones, self.mask_struct),
            np.full(size, self.sessions, np.int32),
            np.ones(size, bool),
        )


def _decide(
    graph: Graph,
    stochastic: bool,
    seed: int,
    weights: Weights,
    batch: UInt32[Array, ""],
    memories: Memory,
    rows: PolicyRows,
) -> tuple[PyTree[Array], Memory]:
    """Actions of the rows, and the memories `[S + 1, ...]` after them. The last row is padding."""
    policy = graph.deployed_policy(stochastic=stochastic)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), batch), rows.slot.shape[0])
    start = graph.start_memory()

    def one(key, row: PolicyRows):
        memory = jax.tree.map(lambda leaf, empty: jnp.where(row.fresh, empty, leaf[row.slot]), memories, start)
        decision = policy(weights, key, memory, row.observation, row.mask)
        return clip_to_space(graph.action_space, decision.action), decision.memory

    actions, after = jax.vmap(one)(keys, rows)
    return actions, jax.tree.map(lambda leaf, new: leaf.at[rows.slot].set(new), memories, after)
