"""Parses transforms written as `NAME` or `NAME:ARGUMENT`, and lists all names."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.envs.named_transforms.definition import Spaces, Transform
from rollmill.envs.named_transforms.images import grey, resize
from rollmill.envs.named_transforms.observations import flatten, frame_stack, keep, one_hot, time_observation
from rollmill.envs.named_transforms.rewards_and_actions import (
    action_repeat,
    rescale_actions,
    reward_clip,
    reward_scale,
    sticky_actions,
)

TRANSFORMS: dict[str, Callable[[str, Spaces], Transform]] = {
    "action-repeat": action_repeat,
    "flatten": flatten,
    "frame-stack": frame_stack,
    "grey": grey,
    "keep": keep,
    "one-hot": one_hot,
    "rescale-actions": rescale_actions,
    "resize": resize,
    "reward-clip": reward_clip,
    "reward-scale": reward_scale,
    "sticky-actions": sticky_actions,
    "time": time_observation,
}
"""Transforms by name: functions of the argument and of the spaces of the environment."""


REWARD_TRANSFORMS = ("reward-scale", "reward-clip")
"""Transforms that change only rewards, and therefore support multi-agent environments."""


class TransformName(NamedTuple):
    """A transform in the notation `NAME` or `NAME:ARGUMENT`."""

    name: str
    argument: str

    def __str__(self) -> str:
        """Returns the notation."""
        return f"{self.name}:{self.argument}" if self.argument else self.name

    def on(self, spaces: Spaces) -> Transform:
        """Returns the transform for an environment with these spaces.

        Raises:
            UsageError: the argument is invalid, or the transform does not support the spaces.
        """
        return TRANSFORMS[self.name](self.argument, spaces)


def parse_transforms(texts: Any) -> list[TransformName]:
    """Parses transforms written as `NAME` or `NAME:ARGUMENT`, and keeps their order.

    Raises:
        UsageError: an element is not a string, or the transform does not exist.
    """
    given = [texts] if isinstance(texts, str) else texts
    if not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        raise UsageError(
            f'transforms={texts!r:.80} must be a list of strings. hint: use transforms=["frame-stack:4"].'
        )
    return [_parse(text) for text in given]


def _parse(text: str) -> TransformName:
    name, _, argument = text.partition(":")
    if name not in TRANSFORMS:
        raise unknown_name("transform", name, TRANSFORMS)
    return TransformName(name, argument.replace(" ", ""))
