"""Defines the type of a named transform, whose functions work on JAX and NumPy arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text

ArrayModule: TypeAlias = Any
"""`jax.numpy` or `numpy`."""

Memory: TypeAlias = PyTree[Any]


def _keep(xp: ArrayModule, value: Any) -> Any:
    return value


def _begin(xp: ArrayModule, observation: Any) -> tuple[Any, Memory]:
    return observation, ()


def _observe(xp: ArrayModule, memory: Memory, observation: Any) -> tuple[Any, Memory]:
    return observation, memory


def _act(xp: ArrayModule, memory: Memory, action: Any, draw: Any) -> tuple[Any, Memory]:
    return action, memory


class Transform(NamedTuple):
    """A change of one environment's observations, actions or rewards.

    The functions are pure. `xp` is `jax.numpy` or `numpy`. The memory holds what the transform remembers of an
    episode, and `begin` creates it anew for each episode.
    """

    observation_space: spaces.Space
    """Space of observations, changed or not."""
    action_space: spaces.Space
    """Space of actions, changed or not."""
    begin: Callable[[ArrayModule, Any], tuple[Any, Memory]] = _begin
    """`(xp, first observation) -> observation, memory`."""
    observe: Callable[[ArrayModule, Memory, Any], tuple[Any, Memory]] = _observe
    """`(xp, memory, observation) -> observation, memory`, after a step."""
    act: Callable[[ArrayModule, Memory, Any, Any], tuple[Any, Memory]] = _act
    """`(xp, memory, action, draw) -> action, memory`, before a step. `draw` is uniform in [0, 1)."""
    draws: bool = False
    """True if `act` uses its argument `draw`, a random number."""
    reward: Callable[[ArrayModule, Any], Any] = _keep
    """`(xp, reward) -> reward`, of one agent."""
    repeats: int = 1
    """Number of steps for which an action is repeated, at most until the episode ends. Rewards are summed."""
    takes_other_actions: bool = False
    """Whether the environment may take actions that the policy did not choose in that state."""


class Spaces(NamedTuple):
    """Observation and action spaces of an environment before or after a transform."""

    observation: spaces.Space
    action: spaces.Space


def box_of(space: spaces.Space, name: str, *, ranks: tuple[int, ...], hint: str) -> spaces.Box:
    """Returns the observation space as a `Box`, if its number of axes is one of `ranks`.

    Raises a `UsageError` for any other space.
    """
    if isinstance(space, spaces.Box) and len(space.shape) in ranks:
        return space
    dimensions = " or ".join(map(str, ranks))
    raise UsageError(
        f"the transform {name} needs observations in a Box with {dimensions} dimensions, got "
        f"{space_text(space)}. hint: {hint}."
    )


def number_of(text: str) -> float | None:
    """Parses a finite number. Returns None for any other string."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def count_of(text: str) -> int | None:
    """Parses a positive integer. Returns None for any other string."""
    return int(text) if text.isascii() and text.isdigit() and int(text) >= 1 else None


def bad_argument(name: str, argument: str, expected: str, example: str) -> UsageError:
    """Returns the error for an invalid argument of a named transform."""
    given = f"{name}:{argument}" if argument else name
    return UsageError(f"the transform {given!r} cannot be used: {expected}. hint: {example}.")
