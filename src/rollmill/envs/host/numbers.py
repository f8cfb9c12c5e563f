"""Checks the numbers of host environments: their types, NaN, infinity, and integers too large for the batch.

Shape letter: `n` environments.
"""

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from jaxtyping import Float, PyTree

from rollmill.core.errors import ContractError, NonFiniteError
from rollmill.core.spaces import format_path, leaf_spaces, part_at

_NUMBERS = (bool, int, float, np.bool_, np.number)
"""Types of rewards and of flags. NumPy would also convert strings and None, a flag `"False"` to True."""


def is_number(value: Any) -> bool:
    """Returns whether a value is a number or a boolean, of Python, or a scalar of any array library."""
    if isinstance(value, _NUMBERS):
        return True
    if isinstance(value, str | bytes) or value is None or not hasattr(value, "__array__"):
        return False
    array = np.asarray(value)
    return array.shape == () and array.dtype.kind in "biuf"


def are_numbers(values: np.ndarray) -> bool:
    """Returns whether an array contains only numbers or booleans."""
    return values.dtype.kind in "biuf" or (values.dtype == object and all(map(is_number, values.flat)))


class NonFinite(NamedTuple):
    """A NaN or an infinity in a batch of host environments, with its place."""

    row: int
    """Index of the environment in the batch."""
    field: str
    """Place of the number, such as `reward` or `observation['arm'][2]`."""
    value: float


def find_non_finite(
    space: spaces.Space, observation: PyTree[np.ndarray], reward: PyTree[Float[np.ndarray, "n ..."]] | None = None
) -> NonFinite | None:
    """Returns the first non-finite number of a batch, or None if all are finite.

    Args:
        space: space of one observation.
        observation: leaves `[n, ...]`.
        reward: rewards of the same step, or None after a reset. In a multi-agent environment, a dictionary of
            kinds.
    """
    parts = leaf_spaces(space)
    fields = ((f"observation{format_path(path)}", part_at(observation, path)) for path, _ in parts)
    for name, array in fields if reward is None else [*_rewards(reward), *fields]:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row, *where = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
            index = f"[{', '.join(map(str, where))}]" if where else ""
            return NonFinite(row, name + index, float(array[row, *where]))
    return None


def non_finite_error(name: str, number: NonFinite, *, index: int, step: int, seed: int) -> NonFiniteError:
    """Returns the error that ends a run because of a non-finite number.

    Args:
        name: name of the environment.
        number: the NaN or infinity, with its place.
        index: global index of the environment.
        step: step of the episode, where 0 is the reset.
        seed: seed of the environment.
    """
    when = f"at step {step} of its episode" if step else "when it was reset"
    return NonFiniteError(
        f"{name}: environment {index} returned {number.field} = {number.value} {when}, with the seed {seed}.\n"
        "hint: this number comes from reset or step of the environment. Clip it, or terminate the episode there."
    )


def _rewards(reward: PyTree[np.ndarray]) -> list[tuple[str, np.ndarray]]:
    if isinstance(reward, dict):
        return [(f"reward[{kind!r}]", array) for kind, array in reward.items()]
    return [("reward", reward)]


class CastError(ContractError):
    """Raised if the dtype of a batch cannot hold an integer."""


def cast_exactly(value: Any, dtype: np.dtype) -> np.ndarray:
    """Casts a value to a dtype. Floating-point values are rounded, but integers must fit exactly.

    Raises a `CastError` with the first integer that the dtype cannot hold.
    """
    array = np.asarray(value)
    if array.dtype == dtype or dtype.kind not in "iu" or np.can_cast(array.dtype, dtype, "safe"):
        return np.asarray(array, dtype)
    try:
        with np.errstate(invalid="ignore"):
            cast = array.astype(dtype)
    except OverflowError:  # Python integers beyond 64 bits
        raise _not_held(array.reshape(-1)[0], dtype) from None
    kept = np.asarray(cast == array)
    if not kept.all():
        raise _not_held(array[~kept].reshape(-1)[0], dtype)
    return cast


def _not_held(number: Any, dtype: np.dtype) -> CastError:
    limits = np.iinfo(dtype)
    return CastError(
        f"the observation {number} cannot be stored as {dtype}, the type of this space, which holds integers "
        f"from {limits.min} to {limits.max}. hint: scale it, or use a Box of float32 as observation space."
    )
