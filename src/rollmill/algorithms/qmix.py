"""QMIX (Rashid et al., "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement Learning",
ICML 2018; "Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement Learning", JMLR 2020).

QMIX is Q-learning for a team with a common reward. A mixing network computes the value of the team from the values
of its agents. The state of the environment determines the weights of the mixing network, which are never negative,
so the best action of the team consists of the best action of each agent.

Departures from the papers: agents have no memory, and learn from single transitions. The target networks move at
every update, Adam replaces RMSProp, and the state is normalised.

Shape letter: `A` agents of the team.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.agent_views import AgentView, central_size_of
from rollmill.algorithms.off_policy import FunctionalNetwork, functional_network
from rollmill.algorithms.team_values import TeamConfig, state_features, team_graph, team_of, team_parts
from rollmill.core.bounds import Count, Range
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig, monotonic_mixer


@with_field_help
@dataclass(frozen=True)
class QMIXConfig(TeamConfig):
    """Hyperparameters of QMIX, named as in the literature."""

    mixing_size: Count = 32
    """Number of hidden units of the mixing network."""
    hypernetwork_size: Annotated[int, Range(0)] = 64
    """Number of hidden units of the hypernetworks that compute the weights of the mixing network. With 0, they are
    linear, as in the 2018 paper."""
    normalize_state: bool = True
    """Normalise the features of each state to mean 0 and variance 1, as in layer normalisation, before the
    hypernetworks read them. Otherwise, the weights of the mixing network grow with the size of the state, and
    training can diverge. A state of one or two features is never normalised."""


def qmix(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: QMIXConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds QMIX for a team of agents with discrete actions, as a graph that `rollmill.train` trains.

    The state that determines the mixing network consists of the environment's central features, or of the
    observations of all agents if it has none, as for the critics of `mappo`.

    Args:
        env: an id, the result of `rollmill.make`, or your own `Environment` that lists its `agents`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `qmix(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `QMIXConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, an action space is not `Discrete`, agents with different
            spaces share parameters, or the environment has one agent, or several kinds that `team` does not list.

    Examples:
        >>> algorithm = rollmill.qmix("TwoStepGame-v0", total_timesteps=50_000)
    """
    parts = team_parts("qmix", QMIXConfig, env, config, overrides, params=params, network=network, sees="central")
    chosen: QMIXConfig = parts.config
    make = partial(
        monotonic_mixer,
        num_agents=sum(kind.count for kind in parts.env.agents),
        state_size=central_size_of(parts.env),
        mixing_size=chosen.mixing_size,
        hypernetwork_size=chosen.hypernetwork_size,
        normalised=chosen.normalize_state,
    )
    mixer = functional_network(make)
    return team_graph("qmix", parts, team_of(parts, partial(_mix, mixer, parts.env), mixer.init))


def _mix(
    mixer: FunctionalNetwork,
    env: Environment | HostEnvironment,
    weights: PyTree[Array],
    values: Float[Array, " A"],
    view: AgentView,
) -> Float[Array, ""]:
    """Returns the team's value, computed by the mixing network for the current state."""
    return mixer(weights, values, state_features(env, view))
