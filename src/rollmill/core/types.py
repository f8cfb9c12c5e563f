"""The nouns that every room of the house uses: an environment, a timestep, what passes between them.

Everything here is about ONE environment, unbatched. Batching is a transform (`envs.transforms`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

Key: TypeAlias = PRNGKeyArray
"""A typed random key, as `jax.random.key` makes it; shape `[]`."""

Observation: TypeAlias = PyTree[Array]
State: TypeAlias = PyTree[Array]
Action: TypeAlias = PyTree[Array]
Params: TypeAlias = PyTree[Any]
Memory: TypeAlias = PyTree[Array]
Info: TypeAlias = dict[str, Any]


class Timestep(NamedTuple):
    """What one step of an environment returns.

    `terminated` says that the episode's end is part of the task, so that no value follows it;
    `truncated` that it was cut (a time limit), so that the value of `observation` still counts.
    """

    observation: Observation
    state: State
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    info: Info


class Reset(Protocol):
    """Starts an episode."""

    def __call__(self, key: Key, params: Params, /) -> tuple[Observation, State]:
        """The first observation and state."""
        ...


class Step(Protocol):
    """Advances an episode by one action; never resets by itself."""

    def __call__(self, key: Key, state: State, action: Action, params: Params, /) -> Timestep:
        """What the action leads to."""
        ...


class AgentKind(NamedTuple):
    """Agents of one kind in a multi-agent environment: alike in what they see and what they can do."""

    name: str
    count: int
    observation_space: gymnasium.Space
    """Of ONE agent."""
    action_space: gymnasium.Space
    """Of ONE agent."""


class Environment(NamedTuple):
    """One environment as a value: two pure functions, two spaces and its parameters.

    `reset` and `step` are ordinary JAX functions of one unbatched environment. `params` is a pytree
    that both receive; its leaves may differ from replica to replica (`envs.transforms.vectorise`).
    `action_mask`, where given, maps `(state, params)` to booleans in the shape of the policy's
    logits: True marks an action that is legal now.

    A multi-agent environment lists its `agents`. Observations, actions and rewards are then dictionaries
    from the kind's name to arrays with an agent axis, `[count, ...]` (rewards `[count]`), and its two
    spaces are `Dict`s of the kinds' spaces with that axis; `terminated` and `truncated` end the episode
    for all. `active` says which agents still take part: what the others do and receive does not count.
    `central` is what a centralised critic may see of the whole.
    """

    name: str
    reset: Reset
    step: Step
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    params: Params = ()
    action_mask: Callable[[State, Params], Bool[Array, "..."]] | None = None
    agents: tuple[AgentKind, ...] = ()
    active: Callable[[State, Params], dict[str, Bool[Array, "..."]]] | None = None
    """Kind to `[count]`; all agents where it is left out."""
    central: Callable[[State, Params], Float[Array, "..."]] | None = None
    """`[features]`; the observations of all agents together where it is left out."""


class HostEnvironment(NamedTuple):
    """An environment that lives on the host CPU as Python objects and cannot be compiled.

    `make_vector(num_envs)` starts that many copies, in worker processes when there is more than one,
    as a `gymnasium.vector.VectorEnv`.
    """

    name: str
    make_vector: Callable[[int], gymnasium.vector.VectorEnv]
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
