"""Creates a host environment, given a function that creates one `gymnasium.Env`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium

from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import HasEvaluationForm, HostEnvironment, HostVector, Options, StartHost
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.host.action_masks import reports_masks
from rollmill.envs.host.copies import close_quietly
from rollmill.envs.host.normalisers import check_wrappers
from rollmill.envs.host.python_vector import PythonVector


@dataclass(frozen=True)
class StartPython:
    """A `StartHost` that starts Python objects with the Gymnasium interface, which `make` returns."""

    name: str
    make: Callable[[], gymnasium.Env] = field(repr=False)
    observation_space: gymnasium.Space = field(repr=False)
    action_space: gymnasium.Space = field(repr=False)
    has_action_mask: bool = field(repr=False)
    reset_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. See `StartHost`."""
        check_indices(self.name, indices)
        env = HostEnvironment(self.name, self, self.observation_space, self.action_space, self.has_action_mask)
        return PythonVector(
            env,
            self.make,
            indices,
            seed=seed,
            generation=generation,
            gamma=gamma,
            reset_options=self.reset_options,
        )


@dataclass(frozen=True)
class StartByName:
    """A `StartHost` of environments that any process can create with `make`, from a name and options."""

    name: str
    options: Options
    start: StartHost = field(repr=False, compare=False)

    @property
    def for_evaluation(self) -> StartHost:
        """Returns the `StartHost` of the environments on which policies are evaluated.

        Their spaces equal the spaces in training. If an environment has no separate form for evaluations, the
        result is this object.
        """
        return start_for_evaluation(self.start)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. See `StartHost`."""
        return self.start(indices, seed=seed, generation=generation, gamma=gamma)


def host_environment(
    name: str, make: Callable[[], gymnasium.Env], *, reset_options: Mapping[str, Any] | None = None
) -> HostEnvironment:
    """Returns a host environment whose copies are created by `make`.

    One copy is created, reset and closed, to find its spaces and whether its infos contain an `action_mask`. The
    mask is an array in the shape of `core.spaces.possible_choices`, in the info of every reset and step.

    Args:
        name: name in messages.
        make: returns a new environment with the Gymnasium interface at each call.
        reset_options: options of every reset.

    Raises:
        UsageError: a space has no fixed shape, or a wrapper scales by statistics of each copy.
        ContractError: making or resetting the first copy raised an exception, or its `action_mask` does not fit
            its action space.
    """
    with attribute_to_user_code(f"{name}: making it"):
        single = make()
    try:
        check_wrappers(name, single)
        struct(single.observation_space)
        struct(single.action_space)
        spaces = single.observation_space, single.action_space
        has_mask = _has_action_mask(name, single, reset_options)
    finally:
        close_quietly(single)
    return HostEnvironment(name, StartPython(name, make, *spaces, has_mask, reset_options), *spaces, has_mask)


def start_for_evaluation(start: StartHost) -> StartHost:
    """Returns the `StartHost` of the environments on which policies are evaluated (`HasEvaluationForm`)."""
    if isinstance(start, partial):  # a partial contains the `gamma` of training, which evaluations do not need
        return start_for_evaluation(start.func)
    return start.for_evaluation if isinstance(start, HasEvaluationForm) else start


def check_indices(name: str, indices: Sequence[int]) -> None:
    """Checks the global indices of environments to start.

    Raises:
        UsageError: there are no indices, or one is negative.
    """
    if len(indices) == 0 or min(indices) < 0:
        raise UsageError(
            f"{name}: start({list(indices)}) needs at least one environment index, and indices begin at 0."
        )


def _has_action_mask(name: str, single: gymnasium.Env, reset_options: Mapping[str, Any] | None) -> bool:
    chosen = {} if reset_options is None else {"options": dict(reset_options)}
    with_options = "" if reset_options is None else f" with the options {reset_options}"
    with attribute_to_user_code(f"{name}: reset{with_options}"):
        _, info = single.reset(seed=0, **chosen)
    return reports_masks(name, info.get("action_mask"), single.action_space)
