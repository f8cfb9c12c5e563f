"""Parameter sharing between agents: maps agent kinds to names of parameter sets."""

from collections.abc import Mapping
from typing import NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.spaces import space_text
from rollmill.core.types import AgentKind

INDEPENDENT = "independent"
"""Value that replaces the name of a parameter set, and gives each agent of a kind separate weights."""


class ParameterSet(NamedTuple):
    """Kinds of agents that share parameters, or one kind whose agents have separate parameters."""

    name: str
    kinds: tuple[AgentKind, ...]
    independent: bool = False
    """True if each agent has separate parameters, which are stacked along a leading axis."""

    @property
    def size(self) -> int:
        """Number of agents of all kinds in the parameter set."""
        return sum(kind.count for kind in self.kinds)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kinds of agents in the parameter set."""
        return tuple(kind.name for kind in self.kinds)

    def first(self, kind: AgentKind) -> int:
        """Returns the index of a kind's first agent among all agents of the parameter set."""
        return sum(member.count for member in self.kinds[: self.names.index(kind.name)])


def parameter_sets(agents: tuple[AgentKind, ...], sharing: Mapping[str, str]) -> tuple[ParameterSet, ...]:
    """Returns the parameter sets of an environment's agents, in the order of the kinds.

    `sharing` maps kinds to names of parameter sets, or to "independent". By default, each kind has a set with its
    own name. Raises a `UsageError` if a kind does not exist, or if kinds with different spaces share parameters.
    """
    for name in sharing:
        if name not in {kind.name for kind in agents}:
            raise unknown_name("kind of agents in sharing", name, [kind.name for kind in agents])
    members: dict[str, list[AgentKind]] = {}
    for kind in agents:
        set_name = sharing.get(kind.name, kind.name)
        members.setdefault(kind.name if _independent(kind, sharing) else set_name, []).append(kind)
    for name, kinds in members.items():
        _check_compatible(name, kinds, sharing)
    return tuple(
        ParameterSet(name, tuple(kinds), _independent(kinds[0], sharing)) for name, kinds in members.items()
    )


def set_of(sets: tuple[ParameterSet, ...], name: str) -> ParameterSet:
    """Returns the parameter set that contains a kind of agents."""
    return next(group for group in sets if name in group.names)


def _independent(kind: AgentKind, sharing: Mapping[str, str]) -> bool:
    return sharing.get(kind.name) == INDEPENDENT


def _check_compatible(name: str, kinds: list[AgentKind], sharing: Mapping[str, str]) -> None:
    first = kinds[0]
    for other in kinds[1:]:
        if _independent(first, sharing) or _independent(other, sharing):
            independent = first.name if _independent(first, sharing) else other.name
            raise UsageError(
                f"sharing={dict(sharing)} gives each {independent} weights of its own, but other kinds share a "
                "set with the same name. hint: give that set another name."
            )
        for attribute in ("observation_space", "action_space"):
            space, other_space = getattr(first, attribute), getattr(other, attribute)
            if space != other_space:
                raise UsageError(
                    f"sharing={dict(sharing)} gives {first.name} and {other.name} the parameters {name!r}, but "
                    f"their {attribute}s differ: {space_text(space)} and {space_text(other_space)}. hint: give "
                    "their sets different names, or give them equal spaces."
                )
