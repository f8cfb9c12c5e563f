"""Puts policies into environments, their own or others with the same spaces."""

from typing import Any

from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.algorithms import environment_functions
from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import NO_OPTIONS, Environment, HostEnvironment, Options
from rollmill.dataflow import Graph
from rollmill.envs import as_environment
from rollmill.envs.host import start_for_evaluation
from rollmill.networks.observations import leaves
from rollmill.policies.policy import LoadedRun
from rollmill.programs.evaluation.compiled import evaluator
from rollmill.programs.evaluation.episodes import Evaluator
from rollmill.programs.evaluation.host_environments import evaluator_on_host


def evaluator_on(
    graph: Graph, weights: PyTree, env: Environment | HostEnvironment | None, *, backend: Any = None, **play: Any
) -> Evaluator:
    """Compiles the evaluation of a graph's policy in an environment, for weights or for their shapes.

    By default, this is the graph's own environment. `backend` compiles the steps of a JAX environment into a
    kernel if possible. Otherwise, XLA computes them. `play` contains `episodes`, `seed` and `stochastic`, as for
    `evaluate_run`. Raises a `UsageError` if the environment has other spaces than the policy.
    """
    graph, host = place_in(graph, env)
    if host is not None:
        return evaluator_on_host(graph, host, **play)
    return evaluator(graph, weights, backend=backend, **play)


def place_in(graph: Graph, env: Environment | HostEnvironment | None) -> tuple[Graph, HostEnvironment | None]:
    """Returns the graph on an environment, by default its own, and the host environment if it is one."""
    if env is not None:
        check_same_spaces(graph, env)
    elif graph.host is not None:
        env = HostEnvironment(
            graph.settings["environment"], graph.host, graph.observation_space, graph.action_space
        )
    if isinstance(env, HostEnvironment):
        return graph, env._replace(start=start_for_evaluation(env.start))
    return graph if env is None else on_environment(graph, env), None


def on_environment(graph: Graph, env: Environment) -> Graph:
    """Returns the graph with its environment replaced by another with the same spaces."""
    if graph.rebuild_for is not None:
        return graph.rebuild_for(env)
    envs = environment_functions(env, num_envs=graph.loops.num_envs)
    return graph._replace(
        environment=envs.step,
        start_environment=envs.start,
        action_mask=envs.action_mask,
        parameters=envs.parameters,
    )


def check_same_spaces(graph: Graph, env: Environment | HostEnvironment) -> None:
    """Raises a `UsageError` if the environment has other observation or action spaces than the policy.

    The bounds of observations may differ, but not their categories, which networks encode as one-hot vectors.
    """
    pairs = {
        "observations": (graph.observation_space, env.observation_space),
        "actions": (graph.action_space, env.action_space),
    }
    for name, (own, other) in pairs.items():
        same = own == other if name == "actions" else _same_observations(own, other)
        if not same:
            raise UsageError(
                f"{env.name} and the policy's training environment have different {name}: {other}, expected {own}."
            )


def _same_observations(own: spaces.Space, other: spaces.Space) -> bool:
    """Returns whether observations of two spaces have the same shapes, dtypes and encodings."""
    encodings = lambda space: {leaf.path: leaf for leaf in leaves(space)}
    return struct(own) == struct(other) and encodings(own) == encodings(other)


def environment_of(
    loaded: LoadedRun, env: Any = None, env_options: Options = NO_OPTIONS
) -> Environment | HostEnvironment:
    """Returns an environment, by default the one that a run was trained on."""
    if env is None:
        refuse_options_alone(env_options)
        settings = loaded.graph.settings
        env, env_options = settings["environment"], settings.get("environment_options", NO_OPTIONS)
    return as_environment(env, env_options)


def refuse_options_alone(env_options: Options) -> None:
    """Raises a `UsageError` for options of an environment that is not named."""
    if env_options:
        raise UsageError(
            f"the options {', '.join(env_options)} need the name of another environment, because the run's own "
            "environment keeps the options of the training. hint: use --env ID on the command line, or env= in "
            "Python."
        )
