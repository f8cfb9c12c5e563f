"""Finds `Box` action spaces that an initial Gaussian policy around 0 hardly reaches.

The policy draws its actions around mean 0, by default with standard deviation 1. Actions are clipped to the
bounds. Each update moves the mean by a small step. A box far from 0, or a very small box, is therefore explored
only at its bounds, and a very large box hardly at all.
"""

import math
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from rollmill.core.spaces import format_path, leaf_spaces

MIN_INSIDE = 0.1
"""Minimum share of first actions within the bounds of a box. A box of width 0.25 around 0 has this share."""
MIN_REACHED = 0.25
"""Minimum share of a box within two standard deviations. A box of width 16 around 0 has this share."""
MAX_WIDTH = float(np.finfo(np.float32).max)
"""Width above which a box counts as unbounded, because some environments give the largest float as a bound."""


class FarBox(NamedTuple):
    """The action dimension that an initial Gaussian policy covers least."""

    where: str
    """Kind of agents as `['taggers']` in a multi-agent environment, and otherwise empty."""
    low: float
    high: float
    inside: float
    """Share of the Gaussian's actions within the bounds."""
    std: float
    """Standard deviation of the Gaussian."""

    @property
    def is_bounded(self) -> bool:
        """Whether both bounds are finite, so that a transform can scale actions to them."""
        return self.high - self.low <= MAX_WIDTH

    def __str__(self) -> str:
        return f"the actions{self.where} lie between {self.low:g} and {self.high:g}, {self._effect}. {self._hint}"

    @property
    def _effect(self) -> str:
        gaussian = f"a Gaussian policy, which begins with mean 0 and standard deviation {self.std:g},"
        if self.inside < MIN_INSIDE:
            return (
                f"and only {self.inside:.1%} of the actions of {gaussian} fall into this range. The others are "
                "clipped"
            )
        return f"and {gaussian} explores only a small part of that range"

    @property
    def _hint(self) -> str:
        if not self.is_bounded:
            return "hint: shift and scale the actions in the environment's step."
        return (
            "hint: --transform rescale-actions (rollmill.transform(env, 'rescale-actions')), or "
            "--network.squash-actions (NetworkConfig(squash_actions=True)). SAC and TD3 scale actions themselves."
        )


def far_boxes(space: spaces.Space, *, std: float = 1.0) -> list[FarBox]:
    """Returns the `Box` spaces that a Gaussian around 0 with standard deviation `std` hardly reaches.

    In a multi-agent environment, the space is a dictionary of kinds.
    """
    worst = (
        _worst(format_path(path), leaf, std)
        for path, leaf in leaf_spaces(space)
        if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
    )
    return [far for far in worst if far is not None]


def _worst(where: str, box: spaces.Box, std: float) -> FarBox | None:
    """Returns the dimension that the Gaussian reaches least, if one is far."""
    bounds = set(zip(np.float64(box.low).ravel().tolist(), np.float64(box.high).ravel().tolist(), strict=True))
    far = [
        FarBox(where, low, high, _inside(low, high, std), std) for low, high in bounds if _is_far(low, high, std)
    ]
    return min(far, key=lambda each: (each.inside, each.low)) if far else None


def _is_far(low: float, high: float, std: float) -> bool:
    if not low < high:  # a single valid value, so every policy reaches it
        return False
    reached = max(min(high, 2 * std) - max(low, -2 * std), 0.0)
    is_wide = high - low <= MAX_WIDTH and reached < MIN_REACHED * (high - low)
    return is_wide or _inside(low, high, std) < MIN_INSIDE


def _inside(low: float, high: float, std: float) -> float:
    """Returns the probability that a Gaussian about 0 lies between two bounds."""
    scale = std * math.sqrt(2)
    return (math.erf(high / scale) - math.erf(low / scale)) / 2
