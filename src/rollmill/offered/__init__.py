"""Offers JAX environments to other libraries, with the interfaces of Gymnasium and PettingZoo."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce
from rollmill.core.types import NO_OPTIONS, Environment, HostEnvironment
from rollmill.envs import as_environment
from rollmill.envs.adapters import import_extra
from rollmill.envs.numbers import drawing
from rollmill.offered.single import SingleEnvironment
from rollmill.offered.vector import VectorEnvironment

if TYPE_CHECKING:
    from rollmill.offered.parallel import ParallelEnvironment

Autoreset = Literal["NextStep", "SameStep", "Disabled"]


@overload
def to_gymnasium(
    env: Environment | str, num_envs: None = None, *, render_mode: str | None = None, **options: Any
) -> SingleEnvironment: ...
@overload
def to_gymnasium(
    env: Environment | str, num_envs: int, *, autoreset_mode: Autoreset = "NextStep", **options: Any
) -> VectorEnvironment: ...
def to_gymnasium(
    env: Environment | str,
    num_envs: int | None = None,
    *,
    autoreset_mode: str | None = None,
    render_mode: str | None = None,
    **options: Any,
) -> SingleEnvironment | VectorEnvironment:
    """Wraps an environment of JAX functions as a Gymnasium environment, for training by other libraries.

    Reset and step are compiled programs. Observations, rewards and flags are NumPy arrays, and actions of a `Box`
    are clipped to its bounds. If the environment has action masks, `info["action_mask"]` marks the legal actions.

    Args:
        env: an environment, or an id of `rollmill.make`.
        num_envs: copies of a `gymnasium.vector.VectorEnv`, which one program steps. Default: a single
            `gymnasium.Env`.
        autoreset_mode: how copies of a vector begin new episodes. `NextStep`, the default as in Gymnasium: in the
            step after the end, whose action is ignored. `SameStep`: in the last step of the old episode, with
            `info["final_obs"]`. `Disabled`: by `reset(options={"reset_mask": ...})`.
        render_mode: `rgb_array` or `ansi` of a single environment that can be drawn or printed.
        **options: options of an id, as for `rollmill.make`.

    Returns:
        The environment. `reset(seed=...)` determines all its random numbers.

    Raises:
        UsageError: `env` is a host environment, is multi-agent, has two players, or an argument is invalid.

    Examples:
        >>> env = rollmill.to_gymnasium("CartPole-v1")
        >>> observation, info = env.reset(seed=0)
    """
    made = _single_agent(env, options)
    if num_envs is None:
        if autoreset_mode is not None:
            raise UsageError(
                f"autoreset_mode={autoreset_mode!r} needs a vector environment, because a single environment is "
                "reset by its user. hint: give num_envs, or leave autoreset_mode out."
            )
        return SingleEnvironment(made, render_mode=render_mode)
    if render_mode is not None:
        raise UsageError(f"render_mode={render_mode!r} needs a single environment. hint: leave num_envs out.")
    mode = coerce("autoreset_mode", Autoreset, autoreset_mode or "NextStep")
    return VectorEnvironment(made, coerce("num_envs", int, num_envs), mode)


def to_pettingzoo(
    env: Environment | str, *, render_mode: str | None = None, **options: Any
) -> "ParallelEnvironment":
    """Wraps a multi-agent environment as a PettingZoo environment, for training by other libraries.

    Args:
        env: an environment with agents, or an id of `rollmill.make`.
        render_mode: `rgb_array` or `ansi` of an environment that can be drawn or printed.
        **options: options of an id, as for `rollmill.make`.

    Returns:
        A `pettingzoo.ParallelEnv`. The agents of a kind are `KIND_0`, `KIND_1` and so on, and legal actions are
        `infos[agent]["action_mask"]`.

    Raises:
        UsageError: `env` is a host environment or has a single agent, PettingZoo is missing, or an argument is
            invalid.

    Examples:
        >>> env = rollmill.to_pettingzoo("TagGridWorld-Small-v0")
    """
    import_extra("pettingzoo", "pettingzoo")
    from rollmill.offered.parallel import ParallelEnvironment

    made = _find_compiled(env, options)
    if not made.agents:
        raise UsageError(f"{made.name} has a single agent. hint: use rollmill.to_gymnasium.")
    return ParallelEnvironment(made, render_mode=render_mode)


def _find_compiled(env: Environment | str, options: Mapping[str, Any]) -> Environment:
    """Returns the environment, if it is made of JAX functions. Parameters with a distribution are drawn."""
    made = as_environment(env, options or NO_OPTIONS)
    if isinstance(made, HostEnvironment):
        raise UsageError(
            f"{made.name} is stepped by Python on the host. hint: create it with gymnasium.make, or with the "
            "library that provides it."
        )
    return drawing(made)


def _single_agent(env: Environment | str, options: Mapping[str, Any]) -> Environment:
    """Returns the environment, if one agent acts in it and it is made of JAX functions."""
    made = _find_compiled(env, options)
    if made.agents:
        raise UsageError(f"{made.name} is a multi-agent environment. hint: use rollmill.to_pettingzoo.")
    if made.num_players > 1:
        raise UsageError(
            f"{made.name} is a two-player game, but Gymnasium environments have one agent. hint: `rollmill train "
            "alphazero` trains on it, and rollmill.match plays it."
        )
    return made
