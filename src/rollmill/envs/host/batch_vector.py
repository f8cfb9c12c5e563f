"""Steps a `gymnasium.vector.VectorEnv` that has any of the three autoreset modes.

Shape letter: `n` environments.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jaxtyping import Bool, PyTree

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.types import FINAL_MASK, UNSTABLE, HostEnvironment, HostStep
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.host.action_masks import LATE_MASK
from rollmill.envs.host.actions import fit_to_space
from rollmill.envs.host.copies import close_quietly
from rollmill.envs.host.layout import allocate, copy_batch, leaves, write_reset
from rollmill.envs.host.numbers import are_numbers
from rollmill.envs.host.observations import writer
from rollmill.envs.host.row_vector import RowVector

Flags = Bool[np.ndarray, " n"]


class BatchVector(RowVector):
    """A `core.types.HostVector` made of one `gymnasium.vector.VectorEnv`, which it owns and closes.

    The step that ends an episode also returns the first observation of the next episode. In the mode SAME_STEP,
    the vector environment does this itself. In the modes NEXT_STEP and DISABLED, the rows whose episodes ended are
    reset at once with `reset(options={"reset_mask": rows})`, so that no step is spent on a reset.
    """

    def __init__(
        self,
        env: HostEnvironment,
        batch: VectorEnv,
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
        gamma: float | None,
        reset_options: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(env, indices, seed=seed, generation=generation, gamma=gamma)
        self._batch = batch
        self._options = dict(reset_options or {})
        self._has_mask, self._is_reset = env.has_action_mask, False
        self._write = writer(env.observation_space)
        self.mode = _mode_of(env.name, batch)
        """How the vector environment begins new episodes."""

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment. If it is called again, the random generators continue."""
        out = allocate(self._struct) if out is None else out
        first, info = self._reset(None if self._is_reset else self._seeds[0], self._options)
        self._is_reset = True
        write_reset(self._observation_space, self._check_observations(first), out)
        self._check_finite(out.observation, None)
        if self._has_mask:
            out.info["action_mask"][:] = self._mask(info, "reset")
            out.info[FINAL_MASK][:] = out.info["action_mask"]
        self._sums.restart()
        return out

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, as described by `HostVector.step`.

        Raises a `ContractError` if the vector environment raised an exception, or breaks the rules of its mode.
        """
        if not self._is_reset:
            raise UsageError(f"{self._name}: step was called before reset.")
        out = allocate(self._struct) if out is None else out
        fitted = fit_to_space(self._action_space, actions, self.num_envs)
        with attribute_to_user_code(f"{self._name}: step of {self.num_envs} environments"):
            observation, reward, terminated, truncated, info = self._batch.step(fitted)
        for target, values, what in zip(out[1:4], (reward, terminated, truncated), FLAGS, strict=True):
            target[:] = self._per_row(values, what)
        if UNSTABLE in out.info:
            out.info[UNSTABLE][:] = info[UNSTABLE]
        copy_batch(self._observation_space, self._check_observations(observation), out.observation)
        self._check_finite(out.observation, out.reward)
        done = out.terminated | out.truncated
        if self.mode is AutoresetMode.SAME_STEP:
            self._take_final(info, done, out)
        else:
            self._begin_next(info, done, out)
        if done.any():
            self._check_finite(out.info["final_observation"], out.reward)
            self._check_finite(out.observation, None)
        self._sums.add(out, done)
        return out

    def close(self) -> None:
        """Closes the vector environment."""
        close_quietly(self._batch)

    def first_info(self) -> Mapping[str, Any]:
        """Returns the infos of the first reset of a vector environment."""
        self._is_reset = True
        return self._reset(self._seeds[0], self._options)[1]

    def check_partial_reset(self) -> None:
        """Checks that the vector environment can reset its first row separately.

        Raises a `ContractError` if it resets other rows, too.
        """
        actions = batch_space(self._action_space, self.num_envs)
        actions.seed(0)
        with attribute_to_user_code(f"{self._name}: step of {self.num_envs} environments"):
            observation = self._batch.step(actions.sample())[0]
        before, after = (allocate(self._struct.observation) for _ in range(2))
        copy_batch(self._observation_space, self._check_observations(observation), before)
        self._reset_rows(np.arange(self.num_envs) == 0, before, after)

    # --- ends of episodes ------------------------------------------------------------------------------

    def _take_final(self, info: Mapping[str, Any], done: Flags, out: HostStep) -> None:
        """Takes the final observations and masks from the infos of a vector environment in the mode SAME_STEP."""
        final = self._take_as_final(info, out)
        if not done.any():
            return
        told = info.get("final_obs")
        for i in done.nonzero()[0]:
            self._write(final, int(i), self._final_of(told, int(i)))
        if self._has_mask:
            masks = self._mask(info.get("final_info", {}), "step that ended an episode (final_info)")
            out.info[FINAL_MASK][done] = masks[done]

    def _take_as_final(self, info: Mapping[str, Any], out: HostStep) -> PyTree[np.ndarray]:
        """Takes a step's masks and observations also as the final ones, and returns these observations."""
        final = out.info["final_observation"]
        copy_batch(self._observation_space, out.observation, final)
        if self._has_mask:
            out.info["action_mask"][:] = out.info[FINAL_MASK][:] = self._mask(info, "step")
        elif info.get("action_mask") is not None:
            raise ContractError(f"{self._name}: {LATE_MASK}")
        return final

    def _final_of(self, told: Any, i: int) -> Any:
        """Returns row `i` of the final observations, which are an array of objects or a batch."""
        if told is None or (isinstance(told, np.ndarray) and told.dtype == object and told[i] is None):
            raise ContractError(
                f"{self._name}: the episode of environment {self._indices[i]} ended, but the infos of that step "
                "have no final_obs for it. Gymnasium's SAME_STEP mode requires one, because the returned "
                "observation already belongs to the next episode."
            )
        return told[i] if isinstance(told, np.ndarray) else jax.tree.map(lambda leaf: leaf[i], told)

    def _begin_next(self, info: Mapping[str, Any], done: Flags, out: HostStep) -> None:
        """Resets the rows whose episodes ended. Before that, `out` holds the final observations."""
        final = self._take_as_final(info, out)
        if not done.any():
            return
        infos = self._reset_rows(done, final, out.observation)
        if self._has_mask:
            out.info["action_mask"][done] = self._mask(infos, "reset")[done]

    def _reset_rows(self, rows: Flags, before: PyTree[np.ndarray], after: PyTree[np.ndarray]) -> Mapping[str, Any]:
        """Resets some rows, writes the observations of all to `after`, and returns the infos."""
        first, info = self._reset(None, {**self._options, "reset_mask": rows.copy()})
        copy_batch(self._observation_space, self._check_observations(first), after)
        pairs = zip(leaves(self._observation_space, before), leaves(self._observation_space, after), strict=True)
        for old, new in pairs:
            moved = ~rows & (old != new).reshape(self.num_envs, -1).any(axis=1)
            if moved.any():
                raise self._reset_too_many(int(moved.nonzero()[0][0]))
        return info

    def _reset_too_many(self, row: int) -> ContractError:
        return ContractError(
            f"{self._name}: reset(options={{'reset_mask': rows}}) changed the observation of row {row}, which "
            f"the mask leaves out. With autoreset_mode={self.mode.name}, a row is reset separately after its "
            "episode has ended, because a step spent on the reset would be learned from. hint: apply reset_mask "
            "and return the observations of the other rows unchanged, or reset in the step that ends an episode "
            "(SAME_STEP, with final_obs in the infos). Gymnasium's own environments support both: gymnasium:ID, "
            "or vectorization_mode='sync'."
        )

    # --- checks ----------------------------------------------------------------------------------------

    def _reset(self, seed: int | None, options: dict[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        with attribute_to_user_code(f"{self._name}: reset of {self.num_envs} environments"):
            return self._batch.reset(seed=seed, options=dict(options) or None)

    def _mask(self, info: Mapping[str, Any], what: str) -> np.ndarray:
        expected = self._struct.info["action_mask"].shape
        mask = np.asarray(info.get("action_mask"))
        if mask.shape != expected:
            raise ContractError(
                f"{self._name}: the infos of a {what} have an action_mask of shape {mask.shape}, expected "
                f"{expected}."
            )
        return mask

    def _per_row(self, values: Any, what: str) -> np.ndarray:
        array = np.asarray(values)
        if array.shape != (self.num_envs,):
            raise ContractError(
                f"{self._name}: step returned {what} of shape {array.shape}, expected ({self.num_envs},)."
            )
        if not are_numbers(array):
            raise ContractError(
                f"{self._name}: step returned {what} {array.tolist()!r:.100}, expected "
                f"{'numbers' if what == FLAGS[0] else 'booleans'}."
            )
        return array

    def _check_observations(self, observation: Any) -> Any:
        """Returns the observations of all rows, if they have the shapes of the space."""
        for leaf, like in zip(
            leaves(self._observation_space, observation),
            leaves(self._observation_space, self._struct.observation),
            strict=True,
        ):
            if np.shape(leaf) != like.shape:
                raise ContractError(
                    f"{self._name}: observations have the shape {np.shape(leaf)}, expected {like.shape} for "
                    "single_observation_space and num_envs."
                )
        return observation


FLAGS = ("rewards", "terminations", "truncations")


def _mode_of(name: str, batch: VectorEnv) -> AutoresetMode:
    """Returns how a vector environment begins new episodes."""
    told = getattr(batch, "autoreset_mode", None) or (batch.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(told)
    except ValueError:
        raise UsageError(
            f"{name}: its metadata has autoreset_mode={told!r}, expected one of gymnasium.vector.AutoresetMode: "
            f"{', '.join(f'AutoresetMode.{mode.name}' for mode in AutoresetMode)}."
        ) from None
