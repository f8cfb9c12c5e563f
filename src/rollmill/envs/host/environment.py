"""A host environment from a function that makes one Python object."""

from collections.abc import Callable, Sequence

import gymnasium
import numpy as np

from rollmill.core.errors import UsageError
from rollmill.core.own_line import blaming
from rollmill.core.spaces import possible_choices, struct
from rollmill.core.types import HostEnvironment, HostVector
from rollmill.envs.host.python_vector import PythonVector, close_quietly


def host_environment(name: str, make: Callable[[], gymnasium.Env]) -> HostEnvironment:
    """The host environment whose copies `make` returns.

    One copy is made, reset and closed, to learn its spaces and whether its infos hold an `action_mask`: an
    array, in the shape of `core.spaces.possible_choices`, in the info of every reset and step.

    Args:
        name: for messages.
        make: returns a new environment, in Gymnasium's interface, each time that it is called.

    Raises:
        UsageError: a space has no fixed shape.
        ContractError: making or resetting the first copy raised.
    """

    def start(
        indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        check_indices(name, indices)
        return PythonVector(env, make, indices, seed=seed, generation=generation, gamma=gamma)

    with blaming(f"{name}: making it"):
        single = make()
    try:
        struct(single.observation_space)
        struct(single.action_space)
        env = HostEnvironment(
            name, start, single.observation_space, single.action_space, _has_action_mask(name, single)
        )
    finally:
        close_quietly(single)
    return env


def check_indices(name: str, indices: Sequence[int]) -> None:
    """Refuses to start no environment at all, and numbers below 0.

    Raises:
        UsageError: either.
    """
    if len(indices) == 0 or min(indices) < 0:
        raise UsageError(
            f"{name}: start({list(indices)}) needs the numbers of at least one environment, from 0 upwards."
        )


def _has_action_mask(name: str, single: gymnasium.Env) -> bool:
    with blaming(f"{name}: reset"):
        _, info = single.reset(seed=0)
    choices, mask = possible_choices(single.action_space), info.get("action_mask")
    return choices is not None and isinstance(mask, np.ndarray) and mask.shape == choices.shape
