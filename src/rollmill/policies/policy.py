"""A trained policy as an object: actions, distributions and values, for single observations and batches.

Shape letters: `*batch` leading axes, none for a single observation, and `n` actions of a `Discrete` space.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.algorithms import clip_to_space
from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text, struct
from rollmill.core.types import Action, Key, Memory
from rollmill.dataflow import Graph, Weights
from rollmill.policies.action_distribution import ActionDistribution, action_distribution
from rollmill.policies.policy_arguments import (
    Shape,
    as_batch,
    check_categories,
    check_finite,
    extra_input_struct,
    holds_jax,
    is_traced,
    key_or_seed,
    on_host,
    possible_mask,
    same_batch,
    spread_key,
)


class LoadedRun(NamedTuple):
    """A graph and its weights, read from a checkpoint of a run."""

    graph: Graph
    weights: Weights
    iteration: int
    name: str = ""
    """Name of the run directory."""
    seed: int | None = None
    """Training seed of the weights, or None if the run trained a single seed."""


class PolicyInput(NamedTuple):
    """Checked arguments of a call to a policy, with leaves `[*batch, ...]`."""

    memory: Any
    observation: Any
    mask: Any
    """Action mask, or the position from which a search starts."""
    batch: Shape
    plain: bool
    """True if results are NumPy arrays."""


class Policy:
    """A trained policy, as returned by `rollmill.load`, for single observations and batches.

    An observation is an element of `observation_space`, with any number of leading axes `[*batch, ...]`. It may
    consist of NumPy or JAX arrays, lists or scalars. Results are JAX arrays if the observation contains JAX
    arrays, and NumPy arrays otherwise. The policy includes the statistics that normalise observations, and the
    scaling of actions to their bounds.

    All methods except `policy(observation)` and `reset` are pure, and `jax.jit`, `jax.vmap` and `jax.grad` can
    trace them. `policy(observation)` is a shorthand for playing step by step: a recurrent policy then remembers
    all observations since the last `reset`.
    """

    def __init__(self, loaded: LoadedRun) -> None:
        graph = loaded.graph
        self._loaded = loaded
        self._decide = jax.jit(partial(_decide, graph), static_argnums=(0, 1))
        self._distribution = jax.jit(partial(_lift, graph.outputs.distribution), static_argnums=0)
        self._value = jax.jit(partial(_lift, graph.outputs.value), static_argnums=0)
        self._q_values = jax.jit(partial(_lift, graph.outputs.q_values), static_argnums=0)
        self._key = jax.random.key(0)
        self._memory: Any = None

    @property
    def observation_space(self) -> spaces.Space:
        """Space of one observation. For multi-agent policies, a `Dict` with an entry for each agent kind, with an
        agent axis.
        """
        return self._loaded.graph.observation_space

    @property
    def action_space(self) -> spaces.Space:
        """Space of one action. For multi-agent policies, a `Dict` with an entry for each agent kind, with an agent
        axis.
        """
        return self._loaded.graph.action_space

    @property
    def recurrent(self) -> bool:
        """True if the policy has a memory."""
        return bool(jax.tree.leaves(self._memory_struct))

    @property
    def searches(self) -> bool:
        """True if actions come from a search, which needs a position of the environment."""
        return self._loaded.graph.outputs.searches

    @property
    def weights(self) -> Weights:
        """All arrays of the policy as a pytree: the weights of networks, and the statistics that normalise
        observations.
        """
        return self._loaded.weights

    @property
    def loaded(self) -> LoadedRun:
        """The graph and weights of the policy, and the iteration that they were saved at."""
        return self._loaded

    def with_weights(self, weights: Weights) -> "Policy":
        """Returns the same policy with other weights. The method can be traced, so `jax.grad` can differentiate
        with respect to weights.

        Args:
            weights: a pytree with the same structure and shapes as `weights`.
        """
        own, other = (jax.tree.map(np.shape, tree) for tree in (self.weights, weights))
        if own != other:
            raise UsageError(
                "these weights must have the same structure and shapes as the policy's weights. hint: map over "
                "policy.weights with jax.tree.map."
            )
        policy = copy(self)
        policy._loaded = self._loaded._replace(weights=weights)
        policy.reset(seed=0)
        return policy

    def __copy__(self) -> "Policy":
        """Returns a policy with the same weights, whose memory goes on separately."""
        policy = Policy.__new__(Policy)
        policy.__dict__.update(self.__dict__)
        return policy

    def __deepcopy__(self, memo: dict[int, Any]) -> "Policy":
        """Returns a policy with a copy of the weights, whose memory goes on separately. The graph is shared."""
        policy = copy(self)
        policy._loaded = self._loaded._replace(weights=jax.tree.map(copy, self.weights))
        return policy

    def __reduce__(self) -> Any:
        """Raises a `UsageError`, because the functions of a policy cannot be pickled."""
        raise UsageError(
            "a policy cannot be pickled, because it contains functions. hint: pass the run directory to the other "
            "process and call rollmill.load there, or write the policy to a file with rollmill.export."
        )

    # --- pure functions -------------------------------------------------------------------------------

    def action(
        self,
        observation: Any,
        *,
        deterministic: bool = True,
        key: Key | None = None,
        seed: Any = None,
        memory: Any = None,
        action_mask: Any = None,
        position: Any = None,
        search: bool = True,
    ) -> Any:
        """Returns the action for each observation, `[*batch, ...]`, inside the bounds of the action space.

        Args:
            observation: observations `[*batch, ...]`. For multi-agent policies, a dictionary with an entry for
                each agent kind.
            deterministic: take the most likely action. If False, the action is sampled as in training, with `key`
                or `seed`.
            key: a random key, which is split over a batch.
            seed: an integer seed instead of a key.
            memory: memory of a recurrent policy, `[*batch, ...]`: from `initial_memory` at the start of an
                episode, then the memory returned with the previous action. If a memory is passed (`()` for a
                policy without memory), the result is a pair of action and next memory.
            action_mask: booleans, True where an action is legal: `[*batch, n]` for a `Discrete` space, or a
                dictionary for multi-agent policies. By default, all actions are legal.
            position: position from which the search of AlphaZero starts, from `rollmill.position(env, state)`.
            search: if False, take the action of the network, without a search.

        Raises:
            UsageError: an argument is missing, or has a wrong shape or dtype; or an observation or memory that is
                not traced contains NaN, infinity, or a category that is not in the observation space.
        """
        key = key_or_seed(key, seed)
        if key is None and not deterministic:
            raise UsageError(
                "sampling an action needs a key or a seed: policy.action(..., deterministic=False, seed=0)."
            )
        alone = self.searches and not search
        given = self._input(observation, memory, action_mask, None if alone else position, searches=not alone)
        keys = spread_key(jax.random.key(0) if key is None else key, given.batch)
        how = _HOW[deterministic, alone]
        action, after = self._decide(
            how, len(given.batch), self.weights, keys, given.memory, given.observation, given.mask
        )
        plain = given.plain and not is_traced(keys)
        action, after = on_host((action, after)) if plain else (action, after)
        return action if memory is None else (action, after)

    def distribution(
        self, observation: Any, *, memory: Any = None, action_mask: Any = None
    ) -> ActionDistribution | dict[str, ActionDistribution]:
        """Returns the action distribution for each observation, in a dictionary if there are several agent kinds.

        For AlphaZero, this is the distribution of the network, without the search. The memory is not advanced. Use
        `action` to get the next memory.

        Args:
            observation: observations `[*batch, ...]`.
            memory: memory of a recurrent policy, `[*batch, ...]`.
            action_mask: as for `action`.

        Raises:
            UsageError: the algorithm has no action distribution, such as DQN and TD3.
        """
        self._require("distribution", "policy.action returns its actions")
        given = self._input(observation, memory, action_mask, searches=False)
        found = self._distribution(len(given.batch), self.weights, given.memory, given.observation, given.mask)
        found = on_host(found) if given.plain else found
        if isinstance(found, dict):
            of_agents = lambda part: (*given.batch, jax.tree.leaves(part)[0].shape[len(given.batch)])
            return {name: action_distribution(part, of_agents(part)) for name, part in found.items()}
        return action_distribution(found, given.batch)

    def value(self, observation: Any, *, memory: Any = None) -> Any:
        """Returns the expected return from each observation on, as float32 `[*batch]`.

        It is in units of the rewards in training, which `normalize_rewards` scales. In a two-player game, it is
        the value for the player to move.

        Args:
            observation: observations `[*batch, ...]`.
            memory: memory of a recurrent policy, `[*batch, ...]`.

        Raises:
            UsageError: the policy has no value, as with DQN, SAC, TD3, MAPPO and IPPO.
        """
        self._require("value", "critics that the policy does not need remain in the training state")
        given = self._input(observation, memory, None, searches=False)
        found = self._value(len(given.batch), self.weights, given.memory, given.observation)
        return on_host(found) if given.plain else found

    def q_values(self, observation: Any) -> Any:
        """Returns the value of each action of a DQN policy, as float32 `[*batch, n]`.

        Args:
            observation: observations `[*batch, ...]`.

        Raises:
            UsageError: the policy has no action values. The critics of SAC and TD3 are part of the training state
                only.
        """
        self._require("q_values", "dqn and pqn policies have them; critics of others remain in the training state")
        given = self._input(observation, None, None, searches=False)
        found = self._q_values(len(given.batch), self.weights, given.observation)
        return on_host(found) if given.plain else found

    def initial_memory(self, batch_shape: int | Shape = ()) -> Any:
        """Returns the memory for the start of an episode, `[*batch_shape, ...]` as NumPy arrays, or `()` for a
        policy without memory.

        Args:
            batch_shape: leading axes of the observations, or the length of a single leading axis.
        """
        shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        spread = lambda leaf: np.broadcast_to(leaf, (*shape, *np.shape(leaf))).copy()
        return jax.tree.map(spread, on_host(self._loaded.graph.start_memory()))

    # --- the shorthand, which remembers ---------------------------------------------------------------

    def __call__(self, observation: Any, *, action_mask: Any = None, stochastic: bool = False) -> Any:
        """Returns the action for one observation or a batch, `[*batch, ...]`, and keeps the policy's memory.

        This method cannot be used under `jax.jit`. Use `action` there.

        Args:
            observation: `[*batch, ...]`. A recurrent policy takes the same leading axes until the next `reset`.
            action_mask: as for `action`.
            stochastic: draw the action, as in training, instead of taking the most likely one.

        Raises:
            UsageError: as for `action`.
        """
        if is_traced(observation, action_mask):
            raise UsageError(
                "policy(observation) keeps its memory between calls, so it cannot be traced. hint: "
                "policy.action(observation, ...) is pure and works within jax.jit and jax.vmap."
            )
        key = None
        if stochastic:
            self._key, key = jax.random.split(self._key)
        memory = self._memory
        if memory is None:
            _, batch = as_batch("the observation", struct(self.observation_space), observation)
            memory = self.initial_memory(batch)
        action, after = self.action(
            observation, deterministic=not stochastic, key=key, memory=memory, action_mask=action_mask
        )
        self._memory = after if self.recurrent else None
        return action

    @property
    def memory(self) -> Any:
        """The memory that calls of `policy(observation)` have built up in this episode, or `()` for a policy
        without memory.
        """
        return self.initial_memory() if self._memory is None else self._memory

    def reset(self, *, seed: int | None = None) -> None:
        """Starts a new episode for calls of `policy(observation)`: clears the memory, and resets the random key if
        `seed` is given.
        """
        self._memory = None
        self._key = self._key if seed is None else jax.random.key(seed)

    # --- arguments ------------------------------------------------------------------------------------

    @property
    def _memory_struct(self) -> PyTree[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self._loaded.graph.start_memory)

    def _require(self, name: str, hint: str) -> None:
        outputs = self._loaded.graph.outputs
        if getattr(outputs, name) is None:
            algorithm = self._loaded.graph.settings["algorithm"]
            if outputs.q_values is not None:
                hint = "policy.q_values returns the value of each action"
            raise UsageError(f"policies of {algorithm} have no {name}. hint: {hint}.")

    def _input(
        self, observation: Any, memory: Any, action_mask: Any, position: Any = None, *, searches: bool
    ) -> PolicyInput:
        array, batch = as_batch("the observation", struct(self.observation_space), observation)
        if memory is None and self.recurrent:
            raise UsageError(
                "this policy is recurrent, so it needs memory=. hint: start each episode with "
                f"policy.initial_memory({batch or ''}), then pass the memory that policy.action returned."
            )
        own = _reshape_like("the memory", self._memory_struct, () if memory is None else memory, batch)
        check_finite("the observation", array)
        check_categories("the observation", self.observation_space, array)
        check_finite("the memory", own)
        if position is not None and action_mask is not None:
            raise UsageError(
                "action_mask has no effect with position=, which has its own legal actions. hint: leave "
                "action_mask out."
            )
        if searches and (self.searches or position is not None):
            mask = self._position_of(position, batch)
        else:
            mask = self._mask_of(action_mask, batch)
        plain = not (holds_jax(observation) or is_traced(self.weights, own, mask))
        return PolicyInput(own, array, mask, batch, plain)

    def _position_of(self, position: Any, batch: Shape) -> Any:
        if not self.searches:
            raise UsageError("position= has no effect, because this policy does not search. hint: leave it out.")
        if position is None:
            raise UsageError(
                "this policy searches from a state of the environment, which an observation does not contain. "
                "hint: use policy.action(observation, position=rollmill.position(env, state)), or search=False "
                "for the action of the network alone. rollmill.evaluate and rollmill.match play whole games."
            )
        return _reshape_like("the position", extra_input_struct(self._loaded.graph), position, batch)

    def _mask_of(self, action_mask: Any, batch: Shape) -> Any:
        if action_mask is None:
            return ()
        expected = possible_mask(self.action_space)
        if isinstance(expected, tuple):
            raise UsageError(
                "an action mask needs a Discrete or MultiDiscrete action space, got "
                f"{space_text(self.action_space)}."
            )
        # kinds without a mask can take all actions
        if isinstance(expected, dict) and isinstance(action_mask, dict):
            expected = {name: part for name, part in expected.items() if name in action_mask}
        return same_batch("the action mask", expected, action_mask, batch)


_HOW = {
    (True, False): "greedy",
    (False, False): "policy",
    (True, True): "network, greedily",
    (False, True): "network, drawn",
}
"""Names of the ways to choose an action, by `deterministic` and by whether a search is left out."""


def _decide(graph: Graph, how: str, rank: int, weights: Weights, *inputs: Any) -> tuple[Action, Memory]:
    """Actions inside their bounds, and next memories, of observations with `rank` leading axes."""

    def one(weights, key, memory, observation, mask):
        if how in ("greedy", "policy"):
            decision = getattr(graph, how)(weights, key, memory, observation, mask)
            return clip_to_space(graph.action_space, decision.action), decision.memory
        assert graph.outputs.distribution is not None
        distribution = graph.outputs.distribution(weights, memory, observation, mask)
        return distribution.mode() if how == "network, greedily" else distribution.sample(key), memory

    return _lift(one, rank, weights, *inputs)


def _lift(function: Callable | None, rank: int, weights: Weights, *inputs: Any) -> Any:
    """Lifts a function of the weights and ONE observation to observations with `rank` leading axes."""
    assert function is not None
    for _ in range(rank):
        function = jax.vmap(function, in_axes=(None, *(0,) * len(inputs)))
    return function(weights, *inputs)


def _reshape_like(name: str, expected: Any, given: Any, batch: Shape) -> Any:
    """Returns a tree with the expected structure and one element for each observation."""
    leaves, structure = jax.tree.flatten(expected)
    if jax.tree.structure(given) != structure:
        raise UsageError(f"{name} has the structure {jax.tree.structure(given)}, expected {structure}.")
    return jax.tree.unflatten(structure, same_batch(name, tuple(leaves), tuple(jax.tree.leaves(given)), batch))
