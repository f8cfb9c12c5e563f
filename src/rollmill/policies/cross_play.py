"""Cross-play: evaluates two policies in different roles of one multi-agent environment."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import PyTree

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.schema import coerce
from rollmill.core.types import (
    NO_OPTIONS,
    Environment,
    GymnasiumObject,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Options,
)
from rollmill.dataflow import ActionMask, Decision, Graph, PolicyFunction
from rollmill.policies.environments import check_same_spaces, environment_of, evaluator_on
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import LoadedRun
from rollmill.policies.rules import RANDOM, Rule, find_rule, graph_of_rule, names_rule
from rollmill.programs.evaluation.episodes import EvaluationEpisodes
from rollmill.runs.specification import import_modules

AnyEnvironment = Environment | HostEnvironment
"""An environment in JAX, or one that Python steps."""


class _Participant(NamedTuple):
    """A policy as one side of cross-play."""

    decide: PolicyFunction
    weights: PyTree
    start_memory: Any


def load_partner(against: str | PathLike[str] | Rule, **options: Any) -> LoadedRun | str | Rule:
    """Loads a policy for the other roles: a run's weights, or a function. See `load_weights`."""
    if isinstance(against, str | PathLike):  # a `Run` is path-like, too
        path = Path(against)
        return str(against) if names_rule(path) else load_weights(path, **options)
    return against


def environment_with_roles(
    loaded: LoadedRun, env: AnyEnvironment | GymnasiumObject | str | None = None, env_options: Options = NO_OPTIONS
) -> AnyEnvironment:
    """Returns the environment in which two policies take different roles: `env`, by default the run's.

    Raises a `UsageError` if the environment has fewer than two agent kinds.
    """
    found = environment_of(loaded, env, env_options)
    if len(found.agents) < 2:
        has = "one kind of agent" if found.agents else "one agent"
        game = isinstance(found, Environment) and found.num_players == 2
        hint = "rollmill.match plays games for two players" if game else "evaluate each run without against"
        raise UsageError(
            f"{found.name} has {has}, so two policies cannot play different roles in it. hint: {hint}."
        )
    return found


def roles_in_turn(env: AnyEnvironment, roles: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Returns the roles that a run plays in each round of cross-play: only `roles`, or each agent kind in turn.

    Raises a `UsageError` if a kind does not exist, or if all kinds are listed.
    """
    kinds = [kind.name for kind in env.agents]
    if not roles:
        return [(name,) for name in kinds]
    for name in roles:
        if name not in kinds:
            raise unknown_name("kind of agents in roles", str(name), kinds)
    if set(roles) == set(kinds):
        raise UsageError(
            f"roles={' '.join(roles)} leaves no role for the other policy. hint: list fewer of "
            f"{' and '.join(kinds)}."
        )
    return [tuple(name for name in kinds if name in roles)]


def cross_play(
    loaded: LoadedRun,
    against: LoadedRun | str | Rule,
    *,
    roles: Sequence[str],
    env: AnyEnvironment | GymnasiumObject | str | None = None,
    env_options: Options = NO_OPTIONS,
    episodes: int = 100,
    seed: int = 0,
    stochastic: bool = False,
    imports: Sequence[str] = (),
) -> EvaluationEpisodes:
    """Plays episodes in which a run's policy acts in some roles, and another policy in all others.

    Args:
        loaded: the run's policy.
        against: the other policy: a loaded run, a function, `random` or `MODULE:FUNCTION`.
        roles: agent kinds that the run's policy plays.
        env: the environment. Default: the run's environment.
        env_options: options of an environment given by id.
        episodes: number of episodes.
        seed: seed of the environments and of stochastic policies.
        stochastic: sample the actions of runs, instead of taking the most likely ones.
        imports: modules to import first, because they register the environment or the function.

    Raises:
        UsageError: the environment has fewer than two agent kinds or other spaces, or the roles are invalid.
    """
    import_modules(imports)
    found = environment_with_roles(loaded, env, env_options)
    if not (names := coerce("roles", tuple[str, ...], tuple(roles))):
        kinds = " or ".join(kind.name for kind in found.agents)
        raise UsageError(
            "against needs roles, the kinds of agents that the run itself plays. hint: pass roles=[...] with "
            f"some of {kinds}."
        )
    (own,) = roles_in_turn(found, names)
    sides = [_side(side, found, stochastic=stochastic) for side in (loaded, against)]
    graph, weights = _joint(sides, own, found), (sides[0].weights, sides[1].weights)
    return evaluator_on(graph, weights, found, episodes=episodes, seed=seed, stochastic=stochastic)(weights)


def _side(side: LoadedRun | str | Rule, env: AnyEnvironment, *, stochastic: bool) -> _Participant:
    if not isinstance(side, LoadedRun):
        return _Participant(graph_of_rule(find_rule(side, env), env).policy, (), tuple)
    check_same_spaces(side.graph, env)
    return _Participant(side.graph.deployed_policy(stochastic=stochastic), side.weights, side.graph.start_memory)


def _joint(sides: Sequence[_Participant], own: Sequence[str], env: AnyEnvironment) -> Graph:
    """Returns a graph that takes the actions of `own` kinds from the first side, and others from the second."""

    def decide(
        weights: tuple[PyTree, PyTree], key: Key, memory: Memory, observation: Observation, mask: ActionMask
    ) -> Decision:
        decisions = [
            side.decide(weight, key, before, observation, mask)
            for side, weight, before in zip(sides, weights, memory, strict=True)
        ]
        by_kind: list[Mapping[str, Any]] = [decision.action for decision in decisions]
        action = {kind.name: by_kind[kind.name not in own][kind.name] for kind in env.agents}
        return Decision(action, tuple(decision.memory for decision in decisions), ())

    graph = graph_of_rule(find_rule(RANDOM, env), env)  # only the environment of this graph is used
    start_memory = lambda: tuple(side.start_memory() for side in sides)
    return graph._replace(policy=decide, greedy=decide, start_memory=start_memory)
