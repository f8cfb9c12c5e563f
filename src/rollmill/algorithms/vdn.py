"""Value decomposition networks (Sunehag et al., "Value-Decomposition Networks For Cooperative Multi-Agent Learning
Based On Team Reward", AAMAS 2018).

VDN is Q-learning for a team with a common reward. The value of the team is the sum of its agents' values, and each
agent computes its value from its own observation and action.

Departures from the paper: agents have no memory, and learn from single transitions by double Q-learning. Their
networks are not duelling. The target network moves at every update.

Shape letter: `A` agents of the team.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.agent_views import AgentView
from rollmill.algorithms.team_values import TeamConfig, team_graph, team_of, team_parts
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig


@with_field_help
@dataclass(frozen=True)
class VDNConfig(TeamConfig):
    """Hyperparameters of VDN, named as in the literature."""


def vdn(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: VDNConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds VDN for a team of agents with discrete actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make`, or your own `Environment` that lists its `agents`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `vdn(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `VDNConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, an action space is not `Discrete`, agents with different
            spaces share parameters, or the environment has one agent, or several kinds that `team` does not list.

    Examples:
        >>> algorithm = rollmill.vdn("TwoStepGame-v0", total_timesteps=50_000)
    """
    parts = team_parts("vdn", VDNConfig, env, config, overrides, params=params, network=network, sees="own")
    return team_graph("vdn", parts, team_of(parts, _sum, lambda key: ()))


def _sum(weights: PyTree[Array], values: Float[Array, " A"], view: AgentView) -> Float[Array, ""]:
    """Returns the sum of the agents' values (equation 4 of the paper)."""
    return jnp.sum(values)
