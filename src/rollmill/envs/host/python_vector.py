"""Host environments that consist of Python objects with the Gymnasium interface, stepped one after the other.

Shape letter: `n` environments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import PyTree

from rollmill.core.types import FINAL_MASK, HostEnvironment, HostStep
from rollmill.envs.host.action_masks import LATE_MASK, mask_of_shape
from rollmill.envs.host.actions import element_splitter
from rollmill.envs.host.episode_sums import RunningSums
from rollmill.envs.host.layout import allocate, leaves, step_struct
from rollmill.envs.host.numbers import is_number
from rollmill.envs.host.observations import writer
from rollmill.envs.host.sequential_vector import OneByOne


class PythonVector(OneByOne):
    """A `core.types.HostVector` of Python objects with the `reset` and `step` of Gymnasium.

    The objects are created at the first reset.
    """

    def __init__(
        self,
        env: HostEnvironment,
        make: Callable[[], gymnasium.Env],
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
        gamma: float | None,
        reset_options: Mapping[str, Any] | None = None,
    ) -> None:
        struct = step_struct(env, len(indices), discounted=gamma is not None)
        sums = RunningSums(len(indices), gamma)
        super().__init__(
            env, make, indices, seed=seed, generation=generation, struct=struct, sums=sums, in_place=True
        )
        self._mask = allocate(struct.info["action_mask"]) if env.has_action_mask else None
        self._write = writer(env.observation_space)
        self._elements = element_splitter(env.action_space)
        self._reset_options = reset_options

    def _step_each(self, actions: PyTree[np.ndarray], out: HostStep) -> None:
        write, current, mask = self._write, self._current, self._mask
        reward, terminated, truncated = out.reward, out.terminated, out.truncated
        envs: list[Any] = self._copies.objects
        for i, (env, action) in enumerate(zip(envs, self._elements(actions), strict=True)):
            try:
                returned = env.step(action)
                try:
                    observation, gained, ends, cut, info = returned
                    if not (is_number(gained) and is_number(ends) and is_number(cut)):
                        raise TypeError
                    reward[i], terminated[i], truncated[i] = gained, ends, cut
                except (TypeError, ValueError, OverflowError) as error:
                    raise _wrong_result(returned) from error
                if info or mask is not None:
                    self._see_mask(i, info)
                write(current, i, observation)
            except (Exception, SystemExit) as error:
                self._copies.fail(i, "step", error)
                self._see_again(i)
                reward[i], terminated[i], truncated[i] = 0.0, False, True

    def _see_again(self, i: int) -> None:
        """Writes the observation from before the action as the observation of this step."""
        pairs = (leaves(self._observation_space, batch) for batch in (self._current, self._previous))
        for target, source in zip(*pairs, strict=True):
            target[i] = source[i]

    def _see_mask(self, i: int, info: Mapping[str, Any]) -> None:
        if self._mask is not None:
            self._mask[i] = mask_of_shape(info["action_mask"], self._mask.shape[1:])
        elif info.get("action_mask") is not None:
            raise ValueError(LATE_MASK)

    def _begin_episode(self, i: int) -> None:
        def reset(env: gymnasium.Env, seed: int | None) -> None:
            options = {} if self._reset_options is None else {"options": dict(self._reset_options)}
            observation, info = env.reset(seed=seed, **options)
            self._see_mask(i, info)
            self._write(self._current, i, observation)

        self._copies.begin_episode(i, reset)

    def _copy_final(self, out: HostStep) -> None:
        if self._mask is not None:
            out.info[FINAL_MASK][:] = self._mask

    def _copy_next(self, out: HostStep) -> None:
        if self._mask is not None:
            out.info["action_mask"][:] = self._mask


def _wrong_result(returned: Any) -> ValueError:
    """Returns the error for a step that returned no tuple of Gymnasium, or a reward or flag that is no number."""
    if not isinstance(returned, tuple) or len(returned) != 5:
        found = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        return ValueError(f"step returned {found}, expected (observation, reward, terminated, truncated, info).")
    _, reward, terminated, truncated, _ = returned
    return ValueError(
        f"step returned reward={reward!r}, terminated={terminated!r} and truncated={truncated!r}, expected a "
        "number and two booleans."
    )
