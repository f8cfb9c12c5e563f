"""Evaluates policies on environments."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.algorithms import clip_to_space
from rollmill.core.errors import UsageError
from rollmill.core.types import NO_OPTIONS, Environment, GymnasiumObject, HostEnvironment, Options
from rollmill.dataflow import Graph
from rollmill.envs import as_environment
from rollmill.policies.cross_play import cross_play, load_partner
from rollmill.policies.environments import evaluator_on, place_in, refuse_options_alone
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import LoadedRun
from rollmill.policies.rules import Rule, find_rule, graph_of_rule, names_rule, refuse_for_rule, shown_rule
from rollmill.programs.evaluation.episodes import EvaluationEpisodes
from rollmill.programs.evaluation.recording import record_episodes, record_on_host
from rollmill.record.transitions import check_recording, write_transitions
from rollmill.runs.specification import import_modules


def evaluate(
    run_dir: str | PathLike[str] | Rule,
    *,
    env: Environment | HostEnvironment | GymnasiumObject | str | None = None,
    env_options: Options = NO_OPTIONS,
    episodes: int = 100,
    checkpoint: str | int = "last",
    seed: int = 0,
    train_seed: int | None = None,
    stochastic: bool = False,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
    record: str | Path | None = None,
    against: str | PathLike[str] | Rule | None = None,
    against_checkpoint: str | int = "last",
    roles: Sequence[str] = (),
) -> EvaluationEpisodes:
    """Plays whole episodes with the policy of a run. The mean return is `episodes.returns.mean()`.

    Instead of a run, you can evaluate a function `(key, observation, legal actions) -> action` of one environment,
    or `random`, which samples from the legal actions. Both require `env`.

    With `against`, two policies share a multi-agent environment: the run plays the kinds of agents in `roles`, and
    the other policy plays all other kinds. `episodes.agent_returns` contains the returns of each kind.

    `train_seed` is the `seed` of `load`. `record` names a new .npz file to which all transitions are written, for
    runs that begin with behaviour cloning. `against` is the directory of another run, whose checkpoint is
    `against_checkpoint`; a function; or `random`. See `load` and `evaluate_run` for the other arguments.

    Raises:
        UsageError: a function is given without an environment, or with an argument that only applies to runs; or
            two policies are given for an environment without several kinds of agents.

    Examples:
        >>> rollmill.evaluate("runs/cartpole", episodes=20).returns.mean()
        >>> rollmill.evaluate("runs/new", against="runs/old", roles=["prey"]).agent_returns["prey"].mean()
    """
    played: dict[str, Any] = {
        "env": env,
        "env_options": env_options,
        "episodes": episodes,
        "seed": seed,
        "imports": imports,
    }
    source: dict[str, Any] = {"seed": train_seed, "imports": imports, "trust": trust}
    if against is None:
        for name in _find_given(against_checkpoint=(against_checkpoint, "last"), roles=(tuple(roles), ())):
            raise UsageError(f"{name} has no effect without against, the other policy. hint: leave it out.")
    if callable(run_dir) or names_rule(run_dir):
        about_runs = _find_given(
            checkpoint=(checkpoint, "last"),
            train_seed=(train_seed, None),
            trust=(trust, False),
            algorithm=(algorithm, None),
            stochastic=(stochastic, False),
            against=(against, None),
        )
        refuse_for_rule(run_dir, about_runs)
        return evaluate_rule(run_dir, record=record, **played)
    loaded = load_weights(run_dir, checkpoint=checkpoint, algorithm=algorithm, **source)
    if against is None:
        return evaluate_run(loaded, stochastic=stochastic, record=record, **played)
    if record is not None:
        raise UsageError(
            "record writes the episodes of one policy, but against adds another. hint: leave one of them out."
        )
    partner = load_partner(against, checkpoint=against_checkpoint, **source)
    return cross_play(loaded, partner, roles=roles, stochastic=stochastic, **played)


def _find_given(**arguments: tuple[Any, Any]) -> list[str]:
    """Returns the names of arguments whose values are not their defaults. Each is a pair of value and default."""
    return [name for name, (value, default) in arguments.items() if value != default]


def evaluate_rule(
    policy: str | PathLike[str] | Rule,
    *,
    env: Environment | HostEnvironment | GymnasiumObject | str | None,
    env_options: Options = NO_OPTIONS,
    episodes: int = 100,
    seed: int = 0,
    imports: Sequence[str] = (),
    record: str | Path | None = None,
) -> EvaluationEpisodes:
    """Plays episodes with a policy that is a function: a Python function, `random`, or `MODULE:FUNCTION`.

    The environments are created as in the evaluation of a run. `imports` are the modules that register them.
    Raises a `UsageError` if there is no environment or no such function.
    """
    if env is None:
        raise UsageError(
            f"{shown_rule(policy)} needs an environment to play in. hint: use --env ID on the command line, or "
            "env= in Python."
        )
    import_modules(imports)
    env = as_environment(env, env_options)
    graph = graph_of_rule(find_rule(policy, env), env)
    return _play(graph, (), None, record, episodes=episodes, seed=seed)


def evaluate_run(
    loaded: LoadedRun,
    *,
    env: Environment | HostEnvironment | GymnasiumObject | str | None = None,
    env_options: Options = NO_OPTIONS,
    episodes: int = 100,
    seed: int = 0,
    stochastic: bool = False,
    imports: Sequence[str] = (),
    record: str | Path | None = None,
) -> EvaluationEpisodes:
    """Plays episodes with a run's policy, in its environment or in another with the same spaces.

    The other environment can be an id such as `gymnasium:CartPole-v1`, with `env_options`. `imports` are modules
    that register environments. A `stochastic` policy samples its actions instead of taking the most likely ones.
    """
    play = {"episodes": episodes, "seed": seed, "stochastic": stochastic}
    if env is None:
        refuse_options_alone(env_options)
        return _play(loaded.graph, loaded.weights, None, record, **play)
    import_modules(imports)
    other = as_environment(env, env_options)
    return _play(loaded.graph, loaded.weights, other, record, **play)


def _play(
    graph: Graph,
    weights: PyTree,
    env: Environment | HostEnvironment | None,
    record: str | Path | None,
    **play: Any,
) -> EvaluationEpisodes:
    """Plays the episodes of `evaluator_on`, and writes their transitions to a file if one is named."""
    if record is None:
        return evaluator_on(graph, weights, env, **play)(weights)
    path = check_recording(record)
    graph, host = place_in(graph, env)
    recorded = (
        record_episodes(graph, weights, **play) if host is None else record_on_host(graph, weights, host, **play)
    )
    chosen = jax.tree.map(jnp.asarray, recorded.transitions["action"])
    action = jax.tree.map(np.asarray, clip_to_space(graph.action_space, chosen))
    write_transitions(path, {**recorded.transitions, "action": action})
    return recorded.episodes
