"""Host environments that consist of one `gymnasium.vector.VectorEnv`, such as a simulator that steps a whole
batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import HostEnvironment, HostVector
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.host.action_masks import reports_masks
from rollmill.envs.host.batch_vector import BatchVector
from rollmill.envs.host.copies import close_quietly
from rollmill.envs.host.environment import check_indices
from rollmill.envs.host.normalisers import check_wrappers

MakeBatch = Callable[[int], VectorEnv]
"""`make(n)` returns a new vector environment of `n` rows."""

PROBED = 2
"""Rows of the probed vector environment. With two rows, the probe shows which of them a reset affects."""


@dataclass(frozen=True)
class StartBatch:
    """A `StartHost` of vector environments, of which each process creates one."""

    name: str
    make: MakeBatch = field(repr=False)
    observation_space: gymnasium.Space = field(repr=False)
    action_space: gymnasium.Space = field(repr=False)
    has_action_mask: bool = field(repr=False)
    reset_options: Mapping[str, Any] | None = field(default=None, repr=False)
    reports_unstable: bool = field(default=False, repr=False)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. See `StartHost`."""
        check_indices(self.name, indices)
        env = HostEnvironment(self.name, self, self.observation_space, self.action_space, self.has_action_mask)
        env = env._replace(reports_unstable=self.reports_unstable)
        batch = made_batch(self.name, self.make, len(indices))
        return BatchVector(
            env, batch, indices, seed=seed, generation=generation, gamma=gamma, reset_options=self.reset_options
        )


def batch_environment(
    name: str, make: MakeBatch, *, reset_options: Mapping[str, Any] | None = None
) -> HostEnvironment:
    """Returns a host environment whose processes step one vector environment each.

    To find its spaces, a vector environment of two rows is created, reset, stepped once and closed. This also
    shows whether its infos contain an `action_mask`, `[n, ...]`, and whether it can reset single rows.

    Args:
        name: name in messages.
        make: function from a number of rows to a new vector environment.
        reset_options: options of every reset.

    Raises:
        UsageError: `make` returns no vector environment, a space has no fixed shape, or single rows cannot be
            reset.
        ContractError: making, resetting or stepping it raised an exception, or its `action_mask` does not fit its
            action space.
    """
    batch = made_batch(name, make, PROBED)
    try:
        check_wrappers(name, batch)
        spaces = batch.single_observation_space, batch.single_action_space
        for space in spaces:
            struct(space)
        env = HostEnvironment(name, StartBatch(name, make, *spaces, False, reset_options), *spaces)
        probe = BatchVector(
            env, batch, range(PROBED), seed=0, generation=0, gamma=None, reset_options=reset_options
        )
        mask = probe.first_info().get("action_mask")
        has_mask = reports_masks(name, mask, batch.single_action_space, rows=(PROBED,))
        _check_partial_reset(name, probe)
    finally:
        close_quietly(batch)
    return HostEnvironment(name, StartBatch(name, make, *spaces, has_mask, reset_options), *spaces, has_mask)


def made_batch(name: str, make: MakeBatch, num_envs: int) -> VectorEnv:
    """Makes a vector environment of `num_envs` rows.

    Raises a `UsageError` if the result is not a vector environment or has another number of rows, and a
    `ContractError` if creating it raised an exception.
    """
    with attribute_to_user_code(f"{name}: making {num_envs} environments"):
        batch = make(num_envs)
    if not isinstance(batch, VectorEnv):
        raise UsageError(
            f"{name}: with num_envs={num_envs}, the function returned a {type(batch).__name__}, expected a "
            "gymnasium VectorEnv. hint: a function that creates single environments takes no arguments."
        )
    if batch.num_envs != num_envs:
        close_quietly(batch)
        raise UsageError(
            f"{name}: with num_envs={num_envs}, the function returned {batch.num_envs} environments. Each "
            "process creates only the environments that it steps, so the function must return `num_envs` of them."
        )
    return batch


def _check_partial_reset(name: str, probe: BatchVector) -> None:
    """Checks that resetting one row leaves the other unchanged. Not needed in the mode SAME_STEP."""
    if probe.mode is AutoresetMode.SAME_STEP:
        return
    try:
        probe.check_partial_reset()
    except ContractError as error:
        raise UsageError(str(error)) from error
