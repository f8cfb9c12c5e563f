"""Transforms of rewards and actions."""

from typing import Any

import jax
import numpy as np
from gymnasium import spaces as gymnasium_spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text, struct
from rollmill.envs.named_transforms.definition import Spaces, Transform, bad_argument, count_of, number_of


def reward_scale(argument: str, spaces: Spaces) -> Transform:
    """Multiplies rewards by FACTOR."""
    factor = number_of(argument)
    if not factor:
        raise bad_argument(
            "reward-scale", argument, "FACTOR must be a finite number other than 0", "reward-scale:0.1"
        )
    return Transform(*spaces, reward=lambda xp, reward: reward * np.float32(factor))


def reward_clip(argument: str, spaces: Spaces) -> Transform:
    """Clips rewards to [-LIMIT, LIMIT], or to [LOW, HIGH]."""
    texts = argument.split(",")
    numbers = [number_of(text) for text in texts]
    if len(numbers) == 1 and numbers[0] is not None:
        numbers = [-numbers[0], numbers[0]]
    low, high = numbers if len(numbers) == 2 else (None, None)
    if low is None or high is None or low >= high:
        expected = "it needs a LIMIT above 0, or LOW,HIGH with LOW below HIGH"
        raise bad_argument("reward-clip", argument, expected, "reward-clip:1 or reward-clip:-1,5")
    return Transform(*spaces, reward=lambda xp, reward: xp.clip(reward, np.float32(low), np.float32(high)))


def action_repeat(argument: str, spaces: Spaces) -> Transform:
    """Repeats each action N times, or until the episode ends.

    Rewards are summed, and the policy sees only the last observation.
    """
    count = count_of(argument)
    if count is None:
        raise bad_argument("action-repeat", argument, "N must be an integer of at least 1", "action-repeat:4")
    return Transform(*spaces, repeats=count, takes_other_actions=count > 1)


def sticky_actions(argument: str, spaces: Spaces) -> Transform:
    """Repeats the previous action of the episode with probability PROBABILITY, in every step except the first.

    From "Revisiting the Arcade Learning Environment" (Machado et al., 2018).
    """
    probability = number_of(argument)
    if probability is None or not 0 < probability < 1:
        expected = "PROBABILITY must lie between 0 and 1"
        raise bad_argument("sticky-actions", argument, expected, "sticky-actions:0.25")

    def begin(xp: Any, observation: Any) -> Any:
        nothing = jax.tree.map(lambda leaf: xp.zeros(leaf.shape, leaf.dtype), struct(spaces.action))
        return observation, (xp.zeros((), bool), nothing)

    def act(xp: Any, memory: Any, action: PyTree, draw: Any) -> Any:
        has_before, before = memory
        repeats = has_before & (draw < np.float32(probability))
        taken = jax.tree.map(lambda old, new: xp.where(repeats, old, xp.asarray(new, old.dtype)), before, action)
        return taken, (xp.ones((), bool), taken)

    return Transform(*spaces, begin=begin, act=act, draws=True, takes_other_actions=True)


def rescale_actions(argument: str, spaces: Spaces) -> Transform:
    """Lets the policy act in [-1, 1], and scales its actions to the bounds of the action space."""
    if argument:
        raise bad_argument("rescale-actions", argument, "it takes no argument", "rescale-actions")
    space = spaces.action
    if not isinstance(space, gymnasium_spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UsageError(f"the transform rescale-actions needs a Box of actions, got {space_text(space)}.")
    if not space.is_bounded():
        raise UsageError(
            f"the transform rescale-actions needs finite bounds for every action, got {space_text(space)}. "
            "hint: leave it out, because unbounded actions need no rescaling."
        )
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    half = (high - low) / np.float32(2)

    def act(xp: Any, memory: Any, action: Any, draw: Any) -> Any:
        inside = xp.clip(action, np.float32(-1), np.float32(1))
        return xp.clip(low + (inside + np.float32(1)) * half, low, high), memory

    return Transform(spaces.observation, gymnasium_spaces.Box(-1.0, 1.0, space.shape, np.float32), act=act)
