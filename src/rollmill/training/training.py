"""Trains an algorithm and records the run in a run directory."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.interruption import handling_early_notices, pass_on_interrupt
from rollmill.core.local_paths import local_path
from rollmill.core.machine import return_freed_memory, without_collection
from rollmill.core.schema import check_names
from rollmill.core.stored_paths import run_folder
from rollmill.dataflow import Graph, check_loops, check_parameters
from rollmill.gpus.jax_settings import check_compiled
from rollmill.hooks import Hook
from rollmill.record.display import Display, choose_display
from rollmill.record.run_directory import RunDirectory, download_run
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.creation import create_run, run_root
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import read_saved
from rollmill.runs.specification import describe
from rollmill.training.driver import check_tracking, copy_to_store, drive
from rollmill.training.hook_calls import check_hooks
from rollmill.training.initial_weights import given_weights
from rollmill.training.placing import choose_plan, refuse_unread, with_settings
from rollmill.training.preparing import PlannedTraining, PreparedTraining, prepare
from rollmill.training.recorder import Run, open_checkpoints
from rollmill.training.sessions import Session


@handling_early_notices()
def train(
    algorithm: Graph,
    options: RunOptions | Mapping[str, Any] | None = None,
    *,
    hooks: Sequence[Hook] = (),
    imports: Sequence[str] = (),
    recipe: str | None = None,
    **overrides: Any,
) -> Run:
    """Trains an algorithm and records the run.

    Args:
        algorithm: a graph, such as `rollmill.ppo(env)`.
        options: options of the run. Single options can be passed as keywords: `train(algorithm, seed=3)`.
        hooks: functions that are called with events (`rollmill.hooks`) in this process while it trains. The result
            of a hook can request a stop or a checkpoint.
        imports: modules that register the environment, network or algorithm. They are recorded, so that the run
            can be resumed. Modules that registered these parts in this process are recorded in any case.
        recipe: name of the recipe that the hyperparameters come from, recorded for readers of the run.
        **overrides: fields of `RunOptions` to replace.

    Returns:
        The run's directory and its summary.

    Raises:
        UsageError: the options cannot be used, or `resume_if_exists` finds a run with another configuration.
            Nothing has been written.
        NonFiniteError: a loss, gradient, weight, observation or reward is not finite.
        StorageError: the run can no longer be written. It can be resumed.
        HookFailed: a hook raised an exception. A checkpoint has been saved, and the run can be resumed.
        Interrupted: Ctrl-C was pressed. A checkpoint has been saved, and `result` is the `Run`.

    Examples:
        >>> run = rollmill.train(rollmill.ppo("CartPole-v1", total_timesteps=500_000), seed=1)
        >>> run.summary["final_return"]
    """
    hooks = check_hooks(hooks)
    check_algorithm(algorithm)
    options = chosen_options(options, overrides)
    if options.resume_if_exists and (run := _resume_earlier(algorithm, options, imports, hooks)):
        return run
    prepared = prepare_training(algorithm, options, imports=imports, recipe=recipe)
    return pass_on_interrupt(begin_training(prepared, hooks))


@without_collection()
def prepare_training(
    algorithm: Graph,
    options: RunOptions | Mapping[str, Any] | None = None,
    *,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    **overrides: Any,
) -> PreparedTraining:
    """Checks and compiles a new run, without writing anything. Takes the arguments of `train`."""
    planned = plan_training(algorithm, chosen_options(options, overrides), imports=imports, recipe=recipe)
    return prepare(planned, None, display_of(planned.options))


def plan_training(
    algorithm: Graph,
    options: RunOptions,
    *,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    described: dict[str, Any] | None = None,
) -> PlannedTraining:
    """Checks a new run and chooses its plan. Takes the arguments of `train`, and raises its errors.

    `described` is the description of the graph. By default it is computed, which traces the graph.
    """
    check_compiled()
    check_algorithm(algorithm)
    options = _settle(options)
    if options.run_dir is not None:
        download_run(options.run_dir)
        RunDirectory.refuse_occupied(options.run_dir)
    plan = choose_plan(algorithm, options)
    refuse_unread(plan, options)
    check_tracking(options)
    given = given_weights(algorithm, options, imports)
    # Checked before the graph is traced, which takes long.
    described = describe(algorithm) if described is None else described
    RunDirectory.check_parent(run_root(described, options))
    return PlannedTraining(algorithm, described, options, plan, tuple(imports), recipe, given)


def begin_training(
    prepared: PreparedTraining,
    hooks: Sequence[Hook] = (),
    *,
    watch: Callable[[Session], Session] = lambda session: session,
) -> Run:
    """Creates the run directory and trains a prepared run, with the hooks, result and errors of `train`.

    `watch` receives the training session, and returns the session to use, such as a wrapper around it.
    """
    options, display = prepared.options, prepared.display
    run = create_run(prepared.config, options)
    display.note(f"run {run.root}")
    with (
        contextlib.closing(display),
        run.lock(),
        copy_to_store(run, options, display),
        open_checkpoints(run, options) as checkpoints,
    ):
        trained = drive(prepared, run, checkpoints, hooks=hooks, watch=watch)
    return_freed_memory()  # mostly memory of the compiler, because a process may train many times
    return trained


def display_of(options: RunOptions) -> Display:
    """Returns the progress display that the options of a run select."""
    return choose_display(quiet=options.quiet, dashboard=options.dashboard)


def _resume_earlier(
    algorithm: Graph, options: RunOptions, imports: Sequence[str], hooks: Sequence[Hook]
) -> Run | None:
    """Resumes the run that an earlier start of this command created. Returns None if there is none yet."""
    from rollmill.training.requeueing import run_to_go_on
    from rollmill.training.resuming import resume

    run = run_to_go_on(algorithm, _settle(options))
    if run is None:
        return None
    again = algorithm if read_saved(run).graph.get("custom") else None
    return resume(
        run.root,
        algorithm=again,
        imports=imports,
        track=options.track,
        quiet=options.quiet,
        dashboard=options.dashboard,
        hooks=hooks,
    )


def _settle(options: RunOptions) -> RunOptions:
    """Returns the options merged with their plan, and with an absolute run directory."""
    options = with_settings(options)
    for name in ("clone", "pool_from"):
        if (path := getattr(options, name)) is not None:
            options = replace(options, **{name: Path(os.path.realpath(local_path(name, path)))})
    if options.start_from is None:
        return options
    return replace(options, start_from=os.path.realpath(run_folder("start_from", options.start_from)))


def chosen_options(options: RunOptions | Mapping[str, Any] | None, overrides: dict[str, Any]) -> RunOptions:
    """Returns the options of a run with `overrides` applied.

    Raises a `UsageError` for unknown names and invalid values.
    """
    hint = "Hyperparameters belong to the algorithm: rollmill.ppo(env, num_envs=8)."
    if isinstance(options, Mapping):
        return chosen_options(None, {**options, **overrides})
    if not isinstance(options, RunOptions | None):
        raise UsageError(f"options is a {type(options).__name__}, expected rollmill.RunOptions(...). {hint}")
    check_names(RunOptions, overrides, what="option of train", hint=hint)
    return replace(options or RunOptions(), **overrides)


def check_algorithm(algorithm: Any) -> None:
    """Raises an error if the argument is not a graph with an environment, if its loops have impossible sizes, or
    if its functions take wrong parameters.
    """
    if isinstance(algorithm, Graph):
        check_loops(algorithm)
        check_parameters(algorithm)
        return
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "")
    name = name if name in ALGORITHMS else "ppo"
    raise UsageError(
        f'expected an algorithm on an environment, got {algorithm!r:.60}. hint: rollmill.{name}("CartPole-v1") '
        "creates one."
    )
