"""Checks the fields of an environment before its functions are traced, and the values that its step returns."""

from typing import Any

from rollmill.core.contracts import Call, check_signature, outline
from rollmill.core.errors import ContractError
from rollmill.core.types import AgentKind, Environment, Timestep

_STATE_CALL = Call(("state", "params"))
CALLS = {
    "reset": Call(("key", "params")),
    "step": Call(("key", "state", "action", "params")),
    "action_mask": _STATE_CALL,
    "active": _STATE_CALL,
    "central": _STATE_CALL,
    "to_move": _STATE_CALL,
}
"""Arguments of the functions of an environment."""


def check_declarations(env: Environment) -> None:
    """Raises a `ContractError` if an environment's function has wrong parameters, or `agents` a wrong type."""
    for field, call in CALLS.items():
        if (function := getattr(env, field)) is not None:
            check_signature(f"{env.name}: {field}", function, call)
    if not isinstance(env.agents, tuple) or not all(isinstance(kind, AgentKind) for kind in env.agents):
        raise ContractError(f"{env.name}: agents is {env.agents!r:.80}, expected a tuple of rollmill.AgentKind.")


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
