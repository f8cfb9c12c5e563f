"""The nouns that every room of the house uses: an environment, a timestep, what passes between them.

Everything here is about ONE environment, unbatched. Batching is a transform (`envs.transforms`).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

Key: TypeAlias = PRNGKeyArray
"""A typed random key, as `jax.random.key` makes it; shape `[]`."""

Observation: TypeAlias = PyTree[Array]
State: TypeAlias = PyTree[Array]
Action: TypeAlias = PyTree[Array]
Params: TypeAlias = PyTree[Any]
Memory: TypeAlias = PyTree[Array]
Info: TypeAlias = dict[str, Any]
Options: TypeAlias = Mapping[str, Any]
"""Keyword arguments by which an environment of a name was made."""

NO_OPTIONS: Options = MappingProxyType({})


class Timestep(NamedTuple):
    """What one step of an environment returns.

    `terminated` says that the episode's end is part of the task, so that no value follows it;
    `truncated` that it was cut (a time limit), so that the value of `observation` still counts.
    """

    observation: Observation
    state: State
    reward: PyTree[Float[Array, "..."]]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    info: Info


class ResetFunction(Protocol):
    """Starts an episode."""

    def __call__(self, key: Key, params: Params, /) -> tuple[Observation, State]:
        """The first observation and state."""
        ...


class StepFunction(Protocol):
    """Advances an episode by one action; never resets by itself."""

    def __call__(self, key: Key, state: State, action: Action, params: Params, /) -> Timestep:
        """What the action leads to."""
        ...


class AgentKind(NamedTuple):
    """Agents of one kind in a multi-agent environment: alike in what they see and what they can do."""

    name: str
    count: int
    observation_space: gymnasium.Space
    """The observations of ONE agent."""
    action_space: gymnasium.Space
    """The actions of ONE agent."""


class Environment(NamedTuple):
    """One environment as a value: two pure functions, two spaces and its parameters.

    `reset(key, params)` returns the first observation and the state, `step(key, state, action, params)` a
    `Timestep`: ordinary JAX functions of one unbatched environment. `params` is a pytree that both receive; its
    leaves may differ from replica to replica (`envs.transforms.vectorise`). `action_mask`, where given, maps
    `(state, params)` to booleans in the shape of the policy's logits: True marks an action that is legal now.

    A multi-agent environment lists its `agents`. Observations, actions and rewards are then dictionaries
    from the kind's name to arrays with an agent axis, `[count, ...]` (rewards `[count]`), and its two
    spaces are `Dict`s of the kinds' spaces with that axis; `terminated` and `truncated` end the episode
    for all. `active` says which agents still take part: what the others do and receive does not count.
    `central` is what a centralised critic may see of the whole.
    """

    name: str
    reset: ResetFunction
    step: StepFunction
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    params: Params = ()
    action_mask: Callable[[State, Params], Bool[Array, "..."]] | None = None
    agents: tuple[AgentKind, ...] = ()
    active: Callable[[State, Params], dict[str, Bool[Array, "..."]]] | None = None
    """Kind to `[count]`; all agents where it is left out."""
    central: Callable[[State, Params], Float[Array, "..."]] | None = None
    """`[features]`; the observations of all agents together where it is left out."""
    options: Options = NO_OPTIONS
    """The options that `make` was given with the name; a run records both, and makes the environment from them."""


class HostStep(NamedTuple):
    """What one step of `n` host environments returns: NumPy arrays, whose axis 0 is the environments.

    As after `envs.auto_reset` and `envs.record_episodes`, where an episode ended, `observation` is the first
    of the next one, while reward and flags are still those of the old one. `info` holds
    `final_observation` (before any reset), `episode_return` (float32) and `episode_length` (int32) up to this
    step, `discounted_return` (float32) where a `gamma` was given, and `action_mask` (what is legal after this
    step) where the environment has one.
    """

    observation: PyTree[np.ndarray]
    reward: Float[np.ndarray, " n"]
    terminated: Bool[np.ndarray, " n"]
    truncated: Bool[np.ndarray, " n"]
    info: dict[str, PyTree[np.ndarray]]


class HostFailure(NamedTuple):
    """An environment raised; another one has taken its place."""

    index: int
    """The environment's number among those of the whole training."""
    doing: str
    """`make`, `reset` or `step`."""
    error: str
    """The exception's type and the first line of what it says."""
    line: str
    """The line of the environment's own code that raised, as `core.own_line` finds it."""
    seed: int
    """The seed of the environment that raised."""


@runtime_checkable
class HostVector(Protocol):
    """`n` host environments that are stepped in this process and reset themselves."""

    @property
    def num_envs(self) -> int:
        """How many: `n`."""
        ...

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed that each of the environments of now was begun with."""
        ...

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Begins an episode in each.

        Args:
            out: the arrays to write, as `envs.step_struct` describes them; new ones where it is left out.

        Returns:
            `out`: the first observations, also as `final_observation`, and the masks; all else is 0 or False.

        Raises:
            ContractError: one environment failed too many times in a row.
        """
        ...

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Advances each by its action, and begins the next episode where one ended.

        Args:
            actions: `[n, ...]`; a `Box`'s are clipped to its bounds.
            out: the arrays to write, as for `reset`.

        Returns:
            `out`. An environment that raised was truncated with reward 0, and its final observation is the
            last whole one; `drain_failures` tells of it.

        Raises:
            ContractError: one environment failed too many times in a row.
            NonFiniteError: a reward or an observation is not finite.
        """
        ...

    def drain_failures(self) -> list[HostFailure]:
        """What failed since the last call, in order."""
        ...

    def close(self) -> None:
        """Closes all environments; for good."""
        ...


class StartHost(Protocol):
    """Starts some of a training's host environments in this process."""

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """The environments of these numbers.

        Args:
            indices: of the environments among those of the whole training; they decide the seeds.
            seed: of the whole training.
            generation: how many times these environments were started before, so that one that is started
                again does not repeat its episodes.
            gamma: where given, discounted returns are recorded, as `envs.record_discounted_returns` does.
        """
        ...


class HostEnvironment(NamedTuple):
    """An environment that lives on the host CPU as Python objects and cannot be compiled.

    `start(range(n), seed=0)` starts `n` of them in this process.
    """

    name: str
    start: StartHost
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    has_action_mask: bool = False
    """Whether it says at each reset and step which actions are legal."""
    options: Options = NO_OPTIONS
    """The options that `make` was given with the name; a run records both, and makes the environment from them."""
