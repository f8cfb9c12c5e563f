"""Which agents learn the same weights: a map from kinds of agents to names of parameter sets."""

from collections.abc import Mapping
from typing import NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import AgentKind

INDEPENDENT = "independent"
"""In the place of a parameter set's name: each agent of the kind has weights of its own."""


class ParameterSet(NamedTuple):
    """Agents with the same parameters, or with parameters of the same shapes, each its own."""

    name: str
    kinds: tuple[AgentKind, ...]
    independent: bool = False

    @property
    def size(self) -> int:
        """How many agents."""
        return sum(kind.count for kind in self.kinds)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kinds."""
        return tuple(kind.name for kind in self.kinds)

    def first(self, kind: AgentKind) -> int:
        """The number, among the agents of the set, of the kind's first agent."""
        return sum(member.count for member in self.kinds[: self.names.index(kind.name)])


def parameter_sets(agents: tuple[AgentKind, ...], sharing: Mapping[str, str]) -> tuple[ParameterSet, ...]:
    """The parameter sets of an environment's agents, in the order of the kinds.

    Args:
        agents: the kinds.
        sharing: kind to the name of its parameter set, or "independent"; a kind that is left out has a set of
            its own name.

    Raises:
        UsageError: for kinds that do not exist, and kinds that share parameters but not their spaces.
    """
    for name in sharing:
        if name not in {kind.name for kind in agents}:
            raise unknown_name("kind of agents in sharing", name, [kind.name for kind in agents])
    members: dict[str, list[AgentKind]] = {}
    for kind in agents:
        chosen = sharing.get(kind.name, kind.name)
        members.setdefault(kind.name if _independent(kind, sharing) else chosen, []).append(kind)
    for name, kinds in members.items():
        _check_alike(name, kinds, sharing)
    return tuple(
        ParameterSet(name, tuple(kinds), _independent(kinds[0], sharing)) for name, kinds in members.items()
    )


def set_of(sets: tuple[ParameterSet, ...], name: str) -> ParameterSet:
    """The set that the kind of that name belongs to."""
    return next(group for group in sets if name in group.names)


def _independent(kind: AgentKind, sharing: Mapping[str, str]) -> bool:
    return sharing.get(kind.name) == INDEPENDENT


def _check_alike(name: str, kinds: list[AgentKind], sharing: Mapping[str, str]) -> None:
    first = kinds[0]
    for other in kinds[1:]:
        if _independent(first, sharing) or _independent(other, sharing):
            both = first.name if _independent(first, sharing) else other.name
            raise UsageError(
                f"sharing={dict(sharing)} lets each {both} have weights of its own and others share a set of "
                "that name; name that set otherwise."
            )
        for what in ("observation_space", "action_space"):
            mine, theirs = getattr(first, what), getattr(other, what)
            if mine != theirs:
                raise UsageError(
                    f"sharing={dict(sharing)} gives {first.name} and {other.name} the parameters {name!r}, but "
                    f"their {what}s differ: {mine} and {theirs}. Give them sets of different names, or spaces "
                    "that are alike."
                )
