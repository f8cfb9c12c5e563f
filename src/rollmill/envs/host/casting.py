"""Casts of what host environments give to the 32-bit dtypes of batches, without a number becoming another."""

from typing import Any

import numpy as np

from rollmill.core.errors import ContractError


class CastError(ContractError):
    """A whole number, or one that should be, that the batch's dtype cannot hold."""


def fitted(value: Any, dtype: np.dtype) -> np.ndarray:
    """Returns the value as an array of this dtype.

    Floating-point numbers are rounded, whole ones have to be kept.

    Raises a `CastError` with the first number that the dtype cannot hold.
    """
    array = np.asarray(value)
    if array.dtype == dtype or dtype.kind not in "iu" or np.can_cast(array.dtype, dtype, "safe"):
        return np.asarray(array, dtype)
    try:
        with np.errstate(invalid="ignore"):
            cast = array.astype(dtype)
    except OverflowError:  # of Python's integers beyond 64 bits
        raise _not_held(array.reshape(-1)[0], dtype) from None
    kept = np.asarray(cast == array)
    if not kept.all():
        raise _not_held(array[~kept].reshape(-1)[0], dtype)
    return cast


def _not_held(number: Any, dtype: np.dtype) -> CastError:
    limits = np.iinfo(dtype)
    return CastError(
        f"the observation {number} cannot be kept as {dtype}, as those of this space are: whole numbers from "
        f"{limits.min} to {limits.max}. hint: scale it, or observe a Box of float32."
    )
