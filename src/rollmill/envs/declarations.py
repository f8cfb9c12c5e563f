"""Checks the fields of an environment before its functions are traced."""

from rollmill.core.errors import ContractError
from rollmill.core.signatures import Call, check_signature
from rollmill.core.types import AgentKind, Environment

_OF_STATE = Call(("state", "params"))
CALLS = {
    "reset": Call(("key", "params")),
    "step": Call(("key", "state", "action", "params")),
    "action_mask": _OF_STATE,
    "active": _OF_STATE,
    "central": _OF_STATE,
    "to_move": _OF_STATE,
}
"""Arguments of the functions of an environment."""


def check_declarations(env: Environment) -> None:
    """Raises a `ContractError` if a function of an environment takes wrong parameters, or `agents` has a wrong
    type.
    """
    for field, call in CALLS.items():
        if (function := getattr(env, field)) is not None:
            check_signature(f"{env.name}: {field}", function, call)
    if not isinstance(env.agents, tuple) or not all(isinstance(kind, AgentKind) for kind in env.agents):
        raise ContractError(f"{env.name}: agents is {env.agents!r:.80}, expected a tuple of rollmill.AgentKind.")
