"""Creates a host environment, given a function that creates an object with the parallel PettingZoo interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import AgentKind, HostEnvironment, HostVector
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.agents import joint_spaces, kinds_by_name
from rollmill.envs.host.action_masks import reports_masks
from rollmill.envs.host.copies import close_quietly
from rollmill.envs.host.environment import check_indices
from rollmill.envs.host.parallel_vector import Agent, Members, ParallelVector

METHODS = ("reset", "step", "close", "observation_space", "action_space")
"""Methods that an environment has to have."""


@dataclass(frozen=True)
class StartParallel:
    """A `StartHost` that starts Python objects with the parallel PettingZoo interface, which `make` returns."""

    name: str
    make: Callable[[], Any] = field(repr=False)
    members: Members = field(repr=False)
    agents: tuple[AgentKind, ...] = field(repr=False)
    has_action_mask: bool = field(repr=False)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. See `StartHost`.

        Raises:
            UsageError: there are no indices, or a `gamma` is given.
        """
        check_indices(self.name, indices)
        if gamma is not None:
            raise UsageError(
                f"{self.name} is a multi-agent environment, whose discounted returns are not recorded."
            )
        env = parallel_of(self)
        return ParallelVector(env, self.make, self.members, indices, seed=seed, generation=generation)


def parallel_of(start: StartParallel) -> HostEnvironment:
    """Returns the multi-agent host environment that a `StartHost` starts."""
    spaces = joint_spaces(start.agents)
    return HostEnvironment(start.name, start, *spaces, start.has_action_mask, agents=start.agents)


def parallel_environment(name: str, make: Callable[[], Any]) -> HostEnvironment:
    """Returns a multi-agent host environment with copies created by `make`.

    One copy is created, reset and closed, to find its agents, their spaces, and whether their infos contain an
    `action_mask`: an array in the shape of `core.spaces.possible_choices`, in every reset and step. Agents with
    names that differ only in a number belong to one kind.

    Args:
        name: name in messages.
        make: returns a new environment with the parallel PettingZoo interface at each call.

    Raises:
        UsageError: the environment has another interface, does not list its agents, or has a space without a fixed
            shape.
        ContractError: making or resetting the first copy raised an exception, or an `action_mask` does not fit
            the action space of its agent.
    """
    with attribute_to_user_code(f"{name}: making it"):
        single = make()
    try:
        possible = _agents(name, single)
        observations = [_space(name, single.observation_space, agent) for agent in possible]
        actions = [_space(name, single.action_space, agent) for agent in possible]
        has_mask = _has_action_mask(name, single)
    finally:
        close_quietly(single)
    pairs = list(zip(observations, actions, strict=True))
    kinds = kinds_by_name([str(agent) for agent in possible], pairs)
    agents = tuple(AgentKind(kind, len(places), *pairs[places[0]]) for kind, places in kinds.items())
    members = {kind: [possible[place] for place in places] for kind, places in kinds.items()}
    return parallel_of(StartParallel(name, make, members, agents, has_mask))


def _agents(name: str, single: Any) -> list[Agent]:
    """Returns all agents that an environment may have."""
    if not all(hasattr(single, method) for method in METHODS):
        raise UsageError(
            f"{name} is a {type(single).__name__}, without the methods of PettingZoo's ParallelEnv. hint: "
            "pettingzoo.utils.aec_to_parallel converts a turn-based environment, if its author allows that."
        )
    possible: list[Agent] = list(getattr(single, "possible_agents", ()))
    if not possible:
        raise UsageError(
            f"{name} does not list its agents: possible_agents is missing or empty. If an environment creates "
            "new agents during an episode, its arrays cannot have a fixed shape."
        )
    return possible


def _space(name: str, space_of: Callable[[Agent], Space], agent: Agent) -> Space:
    with attribute_to_user_code(f"{name}: a space of {agent}"):
        space = space_of(agent)
    try:
        struct(space)
    except UsageError as error:
        raise UsageError(f"{name}: agent {agent}: {error}") from None
    return space


def _has_action_mask(name: str, single: Any) -> bool:
    """Returns whether a reset reports the legal actions of an agent with discrete actions."""
    with attribute_to_user_code(f"{name}: reset"):
        _, infos = single.reset(seed=0)
    masks = {agent: infos.get(agent, {}).get("action_mask") for agent in single.agents}
    found = [reports_masks(f"{name}: {agent}", masks[agent], single.action_space(agent)) for agent in masks]
    return any(found)
