"""Reads the action masks in the infos of host environments.

Shape letter: `n` environments.
"""

from typing import Any

import numpy as np
from gymnasium import spaces

from rollmill.core.errors import ContractError
from rollmill.core.spaces import possible_choices, space_text

LATE_MASK = "its infos contain an action_mask, which was missing from the first reset. hint: return one from both."


def reports_masks(name: str, mask: Any, space: spaces.Space, *, rows: tuple[int, ...] = ()) -> bool:
    """Returns whether the infos of a first reset contain an action mask.

    Args:
        name: name of the environment, or of an agent in it, in messages.
        mask: the `action_mask` in the infos, or None.
        space: space of one action.
        rows: `(n,)` for the infos of a vector environment.

    Raises:
        ContractError: the mask does not fit the space, or contains numbers other than 0 and 1.
    """
    if mask is None:
        return False
    choices = possible_choices(space)
    if choices is None:
        raise ContractError(
            f"{name}: the infos contain an action_mask, but the action space is {space_text(space)}, expected a "
            "Discrete or MultiDiscrete space. hint: leave action_mask out."
        )
    try:
        array = mask_of_shape(mask, (*rows, *choices.shape))
    except ValueError as error:
        raise ContractError(f"{name}: {error} It has one number for each choice of {space_text(space)}.") from None
    is_flag = np.isin(array, (0, 1))
    if not is_flag.all():
        raise ContractError(
            f"{name}: an action_mask contains {array[~is_flag][0]}, expected 1 for a legal action and 0 otherwise."
        )
    return True


def mask_of_shape(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an action mask as an array, or raises a `ValueError` if it has another shape."""
    try:
        array = np.asarray(mask)
    except ValueError:  # parts of different lengths
        raise ValueError(f"an action_mask is {mask}, expected an array of shape {shape}.") from None
    if array.shape != shape:
        raise ValueError(f"an action_mask has the shape {array.shape}, expected {shape}.")
    return array
