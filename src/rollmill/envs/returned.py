"""Values that the functions of an environment return, and the refusal of other kinds."""

from typing import Any

from rollmill.core.errors import ContractError
from rollmill.core.outlines import outline
from rollmill.core.types import Timestep


def as_timestep(name: str, returned: Any) -> Timestep:
    """Returns the result of step.

    Raises a `ContractError` with the environment's name if it is of another kind.
    """
    if isinstance(returned, Timestep):
        return returned
    raise ContractError(
        f"{name}: step returned {outline(returned)}, expected rollmill.Timestep("
        "observation, state, reward, terminated, truncated, info)."
    )
