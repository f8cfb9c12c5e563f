"""Transforms of rewards."""

import numpy as np

from rollmill.envs.named_transforms.definition import Spaces, Transform, bad_argument, number_of


def reward_scale(argument: str, spaces: Spaces) -> Transform:
    """Multiplies rewards by FACTOR."""
    factor = number_of(argument)
    if not factor:
        raise bad_argument(
            "reward-scale", argument, "FACTOR has to be a finite number other than 0", "reward-scale:0.1"
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
