"""Defines the types that all packages share: environments, timesteps, and their parts.

All types describe ONE environment, unbatched. Batching is a transform (`envs.transforms`).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from rollmill.core.drawing import Drawing
from rollmill.core.schedules import NumberSchedule

Key: TypeAlias = PRNGKeyArray
"""A typed random key, as `jax.random.key` returns, of shape `[]`."""

GymnasiumObject: TypeAlias = gymnasium.Env | gymnasium.vector.VectorEnv
"""The result of `gymnasium.make` or `gymnasium.make_vec`. Copies are made from its spec."""

Observation: TypeAlias = PyTree[Array]
State: TypeAlias = PyTree[Array]
Action: TypeAlias = PyTree[Array]
Params: TypeAlias = PyTree[Any]
Memory: TypeAlias = PyTree[Array]
Info: TypeAlias = dict[str, Any]
Options: TypeAlias = Mapping[str, Any]
"""Keyword arguments that `make` passes to an environment's constructor."""

NO_OPTIONS: Options = MappingProxyType({})


class Timestep(NamedTuple):
    """The result of one step of an environment.

    `terminated`: the episode ended by the rules of the task, so the return after this step is zero.
    `truncated`: the episode was cut, for example by a time limit, so the return is bootstrapped from the value of
    `observation`.
    """

    observation: Observation
    state: State
    reward: PyTree[Float[Array, "..."]]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    info: Info


class ResetFunction(Protocol):
    """Function that starts an episode of an environment."""

    def __call__(self, key: Key, params: Params, /) -> tuple[Observation, State]:
        """Returns the first observation and state."""
        ...


class StepFunction(Protocol):
    """Function that advances an episode by one action. It must never reset the environment."""

    def __call__(self, key: Key, state: State, action: Action, params: Params, /) -> Timestep:
        """Returns the timestep after the action."""
        ...


class AgentKind(NamedTuple):
    """A group of agents with equal observation and action spaces in a multi-agent environment."""

    name: str
    count: int
    observation_space: gymnasium.Space
    """Space of ONE agent's observations."""
    action_space: gymnasium.Space
    """Space of ONE agent's actions."""


class Environment(NamedTuple):
    """An environment, which consists of two pure functions, two spaces and parameters.

    `reset(key, params)` returns the first observation and the state. `step(key, state, action, params)` returns a
    `Timestep`. Both are JAX functions of one unbatched environment. `params` is a pytree that both functions
    receive. Its leaves may differ between environments (`envs.transforms.vectorise`). `action_mask`, if given,
    maps `(state, params)` to booleans in the shape of the policy's logits, where True marks a legal action.

    A multi-agent environment lists its `agents`. Observations, actions and rewards are then dictionaries from the
    kind's name to arrays with an agent axis, `[count, ...]` (rewards `[count]`), and its two spaces are `Dict`s of
    the kinds' spaces with that axis. `terminated` and `truncated` end the episode for all. `active` marks the
    agents that still take part. Actions and rewards of other agents are ignored. `central` is the input of a
    centralised critic.

    A zero-sum game of two players who take turns has `num_players=2`. `to_move` returns whose turn it is. Player 0
    makes the first move of an episode. The observation, the action and its mask belong to the player to move. The
    reward of a step belongs to the player who made the move, and the other player gets the negative reward. A
    player who makes an illegal move gets a reward of -1, and the episode terminates.

    A planner, such as a tree search, steps copies of the environment without transforms. `planning_env` is the
    environment without transforms, and `planning_state` returns its part of the state. The transform `plannable`
    sets the three fields of planning.
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
    """Active agents of each kind, `[count]`. Default: all agents."""
    central: Callable[[State, Params], Float[Array, "..."]] | None = None
    """Input of a centralised critic, `[features]`. Default: the observations of all agents."""
    num_players: int = 1
    """2 for a zero-sum game of two players. The agents of a multi-agent environment are not players."""
    to_move: Callable[[State, Params], Int[Array, ""]] | None = None
    """Returns the player whose turn it is, 0 or 1 as int32. Required if there are two players."""
    planning_state: Callable[[State, Params], PyTree[Array]] | None = None
    """Returns the state of the environment without transforms, from which a planner can step `planning_env`. None
    if the environment does not support planning."""
    planning_params: Callable[[State, Params], Params] | None = None
    """Returns the parameters with which a planner steps `planning_env`, for this copy and this episode."""
    planning_env: "Environment | None" = None
    """Environment without transforms, which a planner steps."""
    render: Callable[[State, Params], str] | None = None
    """Formats the state as a multi-line string. The function is called on the host, with NumPy arrays."""
    draw: Callable[[State, Params], Drawing | UInt8[np.ndarray, "H W 3"]] | None = None
    """Draws the state as shapes, or as pixels with the top row first. The function is called on the host, with
    NumPy arrays."""
    compare: Callable[[int, int], str] | None = None
    """Compares this environment with another implementation, given a number of steps and a seed. The returned
    sentence is printed by `check_environment`."""
    reset_ratio: int = 1
    """Number of environments per computed reset. With 1, every step computes a reset of every environment, and
    uses it only if the episode ended, which is best if resets are cheap. With a ratio of `r`, only environments
    whose episode ended are reset, in groups of `E / r` of `E` environments. The results are the same."""
    options: Options = NO_OPTIONS
    """Options with which `make` created the environment. A run records them, to create it again."""
    inputs: Mapping[str, NumberSchedule] = MappingProxyType({})
    """Numeric fields of `params` that options have set. Compiled programs take them as inputs."""


FINAL_MASK = "final_action_mask"
"""Entry of a step's `info` that contains the legal actions of the next state, even if the episode ended there."""


UNSTABLE = "unstable_state"
"""Entry of a step's `info` that is True if the simulation became unstable, which ends the episode."""

OVERFLOW = "simulation_overflow"
"""Entry of a step's `info` that says whether a simulation left out contacts because a buffer was too small."""


class HostStep(NamedTuple):
    """The result of one step of `n` host environments: NumPy arrays with a leading axis of environments.

    If an episode ended, `observation` is the first observation of the next episode, whereas reward and flags
    belong to the ended episode, as with `envs.auto_reset`. `info` holds `final_observation` (before any reset),
    `episode_return` (float32) and `episode_length` (int32) up to this step, and `discounted_return` (float32) if a
    `gamma` was given. An environment with masks adds `action_mask` for `observation`, and with a single agent
    `final_action_mask` for `final_observation`.

    In a multi-agent environment, observations, rewards, masks and `agent_returns` (the return of each kind) are
    dictionaries by kind, as in an `Environment`. `active` and `final_active`, `[n, A]` for each kind, mark the
    agents of `observation` and `final_observation`. Inactive agents keep their last entries.
    """

    observation: PyTree[np.ndarray]
    reward: PyTree[Float[np.ndarray, "n ..."]]
    terminated: Bool[np.ndarray, " n"]
    truncated: Bool[np.ndarray, " n"]
    info: dict[str, PyTree[np.ndarray]]


class HostFailure(NamedTuple):
    """A host environment that raised an exception and was replaced."""

    index: int
    """Global index of the environment in the run."""
    doing: str
    """Call that raised the exception: `make`, `reset` or `step`."""
    error: str
    """Type of the exception and the first line of its message."""
    line: str
    """Line of the environment's code that raised, as found by `core.user_frame`."""
    seed: int
    """Seed of the environment that raised."""


@runtime_checkable
class HostVector(Protocol):
    """A batch of `n` host environments, stepped in this process and reset automatically."""

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        ...

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the current environments, in order."""
        ...

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment.

        Args:
            out: arrays to write, as described by `envs.step_struct`. Default: new arrays.

        Returns:
            `out`, with the first observations, which are also `final_observation`, and the masks. All other arrays
                are 0 or False.

        Raises:
            ContractError: one environment failed too many times in a row.
            EnvironmentFailed: one tried to exit the program.
        """
        ...

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, and resets each environment whose episode ends.

        Args:
            actions: one action for each environment, `[n, ...]`. Actions of a `Box` are clipped to its bounds.
            out: arrays to write, as for `reset`.

        Returns:
            `out`. If an environment raised an exception, its episode is truncated with reward 0 and its last valid
            observation, and `drain_failures` reports the failure.

        Raises:
            ContractError: one environment failed too many times in a row.
            EnvironmentFailed: one tried to exit the program.
            NonFiniteError: a reward or an observation is not finite.
        """
        ...

    def drain_failures(self) -> list[HostFailure]:
        """Returns the failures of environments since the last call, in order."""
        ...

    def close(self) -> None:
        """Closes all environments permanently."""
        ...


@runtime_checkable
class StartHost(Protocol):
    """Function that starts some of a run's host environments in the current process."""

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments with these global indices.

        Args:
            indices: global indices of the environments, which determine the seeds.
            seed: seed of the run.
            generation: 0 for the first start of these environments in a run, and another number for each later
                start, so that a restarted environment does not repeat its episodes, or `envs.host.EVALUATION` to
                evaluate.
            gamma: if given, discounted returns are recorded, as by `envs.record_discounted_returns`.
        """
        ...


@runtime_checkable
class HasEvaluationForm(Protocol):
    """A `StartHost` whose environments differ for evaluations, such as whole games with unclipped rewards."""

    @property
    def for_evaluation(self) -> StartHost:
        """Returns the `StartHost` of the environments for evaluations, whose spaces must not differ."""
        ...


class HostEnvironment(NamedTuple):
    """An environment made of Python objects on the host CPU, which cannot be compiled.

    `start(range(n), seed=0)` starts `n` copies in this process.
    """

    name: str
    start: StartHost
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    has_action_mask: bool = False
    """Whether the environment reports its legal actions at each reset and step."""
    options: Options = NO_OPTIONS
    """Options with which `make` created the environment. A run records them, to create it again."""
    agents: tuple[AgentKind, ...] = ()
    """Kinds of agents, if there are several. Spaces, actions and rewards are then dictionaries by kind."""
    reports_unstable: bool = False
    """Whether the infos of a step contain `UNSTABLE`."""


def is_key(dtype: Any) -> bool:
    """Returns whether a dtype belongs to random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
