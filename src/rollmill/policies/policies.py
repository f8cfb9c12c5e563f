"""Loads trained policies from runs, and evaluates them on environments."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.algorithms import clip_to_space, environment_functions
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.schema import coerce
from rollmill.core.spaces import struct
from rollmill.core.stored_paths import RunPath
from rollmill.core.types import NO_OPTIONS, Environment, GymnasiumObject, HostEnvironment, Options
from rollmill.dataflow import Graph, State, Weights
from rollmill.envs import as_environment
from rollmill.envs.host import start_for_evaluation
from rollmill.networks.observations import leaves
from rollmill.policies.policy import LoadedRun, Policy
from rollmill.policies.rules import Rule, find_rule, graph_of_rule, names_rule, refuse_for_rule, shown_rule
from rollmill.programs.compiled import held_leaves, state_shapes
from rollmill.programs.evaluation.compiled import evaluator
from rollmill.programs.evaluation.episodes import EvaluationEpisodes, Evaluator
from rollmill.programs.evaluation.host_environments import evaluator_on_host
from rollmill.programs.evaluation.recording import record_episodes, record_on_host
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.run_directory import RunDirectory
from rollmill.record.transitions import check_recording, write_transitions
from rollmill.runs.options import RunOptions
from rollmill.runs.reopening import reopen
from rollmill.runs.saved_run import check_identity
from rollmill.runs.specification import import_modules

NEWEST, BEST = "last", "best"
"""Checkpoint names. Any other checkpoint is given by the number of its iteration."""


def load(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    seed: int | None = None,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Policy:
    """Returns the policy of a run: `policy = rollmill.load(run)`, `action = policy.action(observation)`.

    Args:
        run_dir: directory of the run.
        checkpoint: `last`; the number of an iteration; or `best`, the checkpoint with the best mean return over
            seeds, from evaluations if the run had any.
        seed: the seed to load, if the run trained several. Default: the first.
        algorithm: the graph, if the run was created with parts that exist only in Python.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow this run directory to import the modules that it names, now and later. A run that was created
            on this machine needs no permission.

    Examples:
        >>> policy = rollmill.load("runs/cartpole", checkpoint="best")
        >>> policy.action([0.0, 0.1, 0.0, -0.1])
    """
    loaded = load_weights(
        run_dir, checkpoint=checkpoint, seed=seed, algorithm=algorithm, imports=imports, trust=trust
    )
    return Policy(loaded)


def load_weights(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    seed: int | None = None,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> LoadedRun:
    """Loads the graph of a run and the weights of its policy. See `load` for arguments and errors."""
    found = restore_run(run_dir, checkpoint=checkpoint, algorithm=algorithm, imports=imports, trust=trust)
    weights_of = weights_of_seed(found.run, found.graph, found.seeds, seed)
    weights = weights_of(found.restored.state)
    return LoadedRun(found.graph, weights, found.restored.iteration, found.run.root.resolve().name)


def weights_of_seed(
    run: RunDirectory, graph: Graph, seeds: Sequence[int], seed: int | None
) -> Callable[[State], Weights]:
    """Returns a function from a run's training state to the policy weights of one seed, by default the first.

    Raises a `UsageError` if the run did not train this `seed`.
    """
    if seed is not None and seed not in seeds:
        raise UsageError(
            f"seed={seed} was not trained in {run.root}, which has the seeds {', '.join(map(str, seeds))}."
        )
    if len(seeds) == 1:
        return lambda state: graph.weights(state.learner)
    place = 0 if seed is None else seeds.index(seed)
    return lambda state: jax.tree.map(lambda leaf: leaf[place], graph.weights(state.learner))


class RestoredRun(NamedTuple):
    """A reopened run together with the training state of one of its checkpoints."""

    run: RunDirectory
    graph: Graph
    seeds: tuple[int, ...]
    restored: Restored


def restore_run(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> RestoredRun:
    """Loads a run's graph and the training state of one of its checkpoints. See `load` for the arguments.

    Raises a `CheckpointError` if the directory is not a run, or has no complete checkpoint.
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    graph, options = reopen(run, algorithm=algorithm, imports=imports, trust=trust)
    return _restore(run, graph, options, checkpoint)


def _restore(run: RunDirectory, graph: Graph, options: RunOptions, checkpoint: str | int) -> RestoredRun:
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        chosen = _iteration(run, checkpoints, checkpoint)
        check = lambda iteration, metadata: check_identity(run, metadata, iteration)
        shapes = state_shapes(graph, options.seeds)
        given = held_leaves(graph, shapes.key.shape)
        restored = checkpoints.restore(shapes, iteration=chosen, check=check, given=given)
    if restored is None:
        raise CheckpointError(
            f"{run.root} has no checkpoint yet. hint: `{run.command('resume')}` starts the run from the beginning."
        )
    return RestoredRun(run, graph, options.seeds, restored)


def restore_newest(run_dir: str | PathLike[str], *, count: int, imports: Sequence[str] = ()) -> list[RestoredRun]:
    """Loads the newest checkpoints of a run, at most `count`, oldest first.

    Raises a `CheckpointError` if the directory is not a run, has no checkpoint, or contains a damaged one.
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        newest = checkpoints.iterations()[-count:]
    chosen: list[str | int] = [*newest] or [NEWEST]  # raises the error if there is no checkpoint
    graph, options = reopen(run, imports=imports)
    return [_restore(run, graph, options, iteration) for iteration in chosen]


def _iteration(run: RunDirectory, checkpoints: Checkpoints, checkpoint: str | int) -> int | None:
    """Returns the iteration of a checkpoint, or None for the last, which an earlier checkpoint may replace."""
    if checkpoint == BEST:
        return _best(run, checkpoints)
    if checkpoint == NEWEST:
        return None
    if not str(checkpoint).isdecimal():
        raise UsageError(
            f"checkpoint={checkpoint!r} must be {NEWEST}, {BEST} or the iteration of a saved checkpoint: "
            f"{', '.join(map(str, checkpoints.iterations())) or 'none'}."
        )
    return int(checkpoint)


def _best(run: RunDirectory, checkpoints: Checkpoints) -> int:
    """Returns the iteration of the checkpoint with the best return."""
    best = checkpoints.best()
    if best is None:
        raise UsageError(
            f"{run.root} has no best checkpoint: none was saved after enough episodes for a mean return (and "
            "keep_best=0 keeps none). hint: use the last checkpoint."
        )
    return best


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
    from rollmill.policies.cross_play import cross_play, load_partner

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


def refuse_options_alone(env_options: Options) -> None:
    """Raises a `UsageError` for options of an environment that is not named."""
    if env_options:
        raise UsageError(
            f"the options {', '.join(env_options)} need the name of another environment, because the run's own "
            "environment keeps the options of the training. hint: use --env ID on the command line, or env= in "
            "Python."
        )


def evaluator_on(
    graph: Graph,
    weights: PyTree,
    env: Environment | HostEnvironment | None,
    *,
    backend: Any = None,
    **play: Any,
) -> Evaluator:
    """Compiles the evaluation of a graph's policy in an environment, for weights or for their shapes.

    By default, this is the graph's own environment. `backend` compiles the steps of a JAX environment into a
    kernel if possible. Otherwise, XLA computes them. `play` contains `episodes`, `seed` and `stochastic`, as for
    `evaluate_run`. Raises a `UsageError` if the environment has other spaces than the policy.
    """
    graph, host = _place_in(graph, env)
    if host is not None:
        return evaluator_on_host(graph, host, **play)
    return evaluator(graph, weights, backend=backend, **play)


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
    graph, host = _place_in(graph, env)
    recorded = (
        record_episodes(graph, weights, **play) if host is None else record_on_host(graph, weights, host, **play)
    )
    chosen = jax.tree.map(jnp.asarray, recorded.transitions["action"])
    action = jax.tree.map(np.asarray, clip_to_space(graph.action_space, chosen))
    write_transitions(path, {**recorded.transitions, "action": action})
    return recorded.episodes


def _place_in(graph: Graph, env: Environment | HostEnvironment | None) -> tuple[Graph, HostEnvironment | None]:
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
