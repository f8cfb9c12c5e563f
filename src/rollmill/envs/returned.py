"""Checks the values that an environment's reset and step return."""

from typing import Any

from rollmill.core.errors import ContractError
from rollmill.core.outlines import outline
from rollmill.core.types import Timestep


def as_timestep(name: str, returned: Any) -> Timestep:
    """Returns the result of an environment's step as a `Timestep`.

    Raises a `ContractError` with the environment's name if the result has another type.
    """
    if isinstance(returned, Timestep):
        return returned
    raise ContractError(
        f"{name}: step returned {outline(returned)}, expected rollmill.Timestep("
        "observation, state, reward, terminated, truncated, info)."
    )
