"""Defines the environment fragment of multi-agent algorithms, for JAX environments and host environments.

A host environment returns active agents and observations separately. This module combines them into an
`AgentView`, without copying arrays.

Shape letter: `n` environments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import PyTree

from rollmill.algorithms.agent_views import AgentView, CriticSees, view_agents
from rollmill.algorithms.building import refuse_params
from rollmill.algorithms.fragments import EnvironmentFunctions, environment_functions, host_functions
from rollmill.algorithms.sizes import steps_each
from rollmill.core.types import Environment, HostEnvironment, HostFailure, HostStep, HostVector, Params, StartHost
from rollmill.envs.host import start_for_evaluation


def agent_environment(
    env: Environment | HostEnvironment,
    config: Any,
    *,
    params: Params | None,
    critic: CriticSees,
    final_mask: bool = False,
) -> tuple[EnvironmentFunctions, StartHost | None]:
    """Returns the functions of a multi-agent environment, and the start function of a host environment.

    `params` replaces the environment's own parameters. `final_mask` records the legal actions of final states, if
    a JAX environment has action masks. Raises a `UsageError` if a host environment is given parameters.
    """
    if isinstance(env, HostEnvironment):
        refuse_params(env, params)
        return host_functions(env, view=add_agent_views), StartViewed(env.start)
    view = partial(view_agents, critic=critic)
    functions = environment_functions(
        env,
        params=params,
        num_envs=config.num_envs,
        final_mask=final_mask,
        view=view,
        planned_steps=steps_each(config),
    )
    return functions, None


def add_agent_views(step: HostStep) -> HostStep:
    """Returns a host step in which each observation is an `AgentView`, which includes the active agents.

    The arrays are shared with the original step.
    """
    info = dict(step.info)
    active, final_active = info.pop("active"), info.pop("final_active")
    info["final_observation"] = AgentView(info["final_observation"], final_active, ())
    return step._replace(observation=AgentView(step.observation, active, ()), info=info)


def remove_agent_views(step: HostStep) -> HostStep:
    """Reverts `add_agent_views`: returns a host step with plain observations and separate active agents."""
    view, final = step.observation, step.info["final_observation"]
    info = {**step.info, "final_observation": final.agents, "active": view.active, "final_active": final.active}
    return step._replace(observation=view.agents, info=info)


@dataclass(frozen=True)
class StartViewed:
    """A `StartHost` of multi-agent environments that return observations as an `AgentView`."""

    start: StartHost

    @property
    def for_evaluation(self) -> StartHost:
        """Returns the `StartHost` of the environments for evaluations, whose spaces do not differ."""
        return StartViewed(start_for_evaluation(self.start))

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. The arguments are described at `StartHost`."""
        return ViewedVector(self.start(indices, seed=seed, generation=generation, gamma=gamma))


class ViewedVector:
    """A `core.types.HostVector` that returns multi-agent observations as an `AgentView`."""

    def __init__(self, vector: HostVector) -> None:
        self._vector = vector

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return self._vector.num_envs

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the current environments, in order."""
        return self._vector.seeds

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment."""
        return add_agent_views(self._vector.reset(out=None if out is None else remove_agent_views(out)))

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, and resets each environment whose episode ends."""
        return add_agent_views(self._vector.step(actions, out=None if out is None else remove_agent_views(out)))

    def drain_failures(self) -> list[HostFailure]:
        """Returns the failures of environments since the last call, in order."""
        return self._vector.drain_failures()

    def close(self) -> None:
        """Closes all environments."""
        self._vector.close()
