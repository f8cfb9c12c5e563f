"""Trains a graph into a run directory, and goes on where a run stopped."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollmill.api.algorithms import ALGORITHMS
from rollmill.api.changes import changed_settings, check_end, note_changes, note_option
from rollmill.api.creation import create_run, run_config, run_root
from rollmill.api.driver import drive
from rollmill.api.evaluations import PeriodicEvaluation, prepare_evaluation
from rollmill.api.hook_calls import check_hooks
from rollmill.api.options import WORKER_LIMITS, RunOptions
from rollmill.api.placing import choose_plan, prepare_devices, refuse_unread, with_settings
from rollmill.api.recorder import Run, open_checkpoints
from rollmill.api.reopening import open_graph
from rollmill.api.saved_run import check_identity, read_options, read_saved, read_summary
from rollmill.api.sessions import Session, compile_program, open_session, run_spec, tell_replay_size
from rollmill.api.specification import describe, import_modules, only_here
from rollmill.api.starting import GivenWeights, given_weights
from rollmill.api.trust import approved_imports
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.fields import check_names, fit
from rollmill.core.jax_settings import check_compiled
from rollmill.dataflow import Graph, fingerprint
from rollmill.execution import CompiledProgram, Fusion, RunSpec, state_shapes
from rollmill.hooks import Hook
from rollmill.planning import PLACEMENT, PlacementOptions, Plan, place_custom, settings_of
from rollmill.record import Display, RunDirectory, choose_display


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
        options: how to run it; single ones can be given as keywords: `train(algorithm, seed=3)`.
        hooks: functions of an event (`rollmill.hooks`), called in this process while it trains; each may request
            a stop or a checkpoint by what it returns.
        imports: modules that registered the environment, network or algorithm, noted for whoever resumes the run.
        recipe: name of the recipe that the hyperparameters come from, noted for readers of the run.
        **overrides: fields of `RunOptions` to replace.

    Returns:
        The run's directory and its summary.

    Raises:
        UsageError: for options that cannot be used; nothing was written then.
        NonFiniteError: if a loss, gradient, weight, observation or reward is not finite.
        StorageError: if the run cannot be written any further; it can be resumed.
        HookFailed: if a hook raised; the training has stopped with a checkpoint, and can be resumed.
    """
    hooks = check_hooks(hooks)
    prepared = prepare_training(algorithm, options, imports=imports, recipe=recipe, **overrides)
    return begin_training(prepared, hooks)


class PreparedTraining(NamedTuple):
    """A training that is checked and compiled, and has not begun; nothing is written yet."""

    algorithm: Graph
    options: RunOptions
    config: dict[str, Any]
    """The content of config.json."""
    spec: RunSpec
    program: CompiledProgram | None
    """The whole training, if it is one program of this process."""
    display: Display
    evaluation: PeriodicEvaluation | None = None
    """The evaluation of its policy while it trains."""
    given: GivenWeights | None = None
    """Weights that it begins with, instead of random ones."""


def prepare_training(
    algorithm: Graph,
    options: RunOptions | Mapping[str, Any] | None = None,
    *,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    **overrides: Any,
) -> PreparedTraining:
    """Checks and compiles a training; arguments and errors are those of `train`."""
    check_compiled()
    check_algorithm(algorithm)
    options = with_settings(chosen_options(options, overrides))
    if options.start_from is not None:
        options = replace(options, start_from=str(Path(options.start_from).resolve()))
    if options.run_dir is not None:
        RunDirectory.refuse_occupied(Path(options.run_dir))
    plan = choose_plan(algorithm, options)
    refuse_unread(plan, options)
    given = given_weights(algorithm, options, imports)
    described = describe(algorithm)  # which traces the graph: options that cannot be used are refused before it
    plan = place_custom(plan, options, only_here(described, imports))
    RunDirectory.check_parent(run_root(described, options))
    display = choose_display(quiet=options.quiet)
    if given:
        display.note(str(given))
    tell_replay_size(algorithm, plan, options, display)
    evaluation = prepare_evaluation(algorithm, described, options, display)
    program = compile_program(algorithm, plan, options, display) if plan.place == "program" else None
    config = run_config(described, options, imports, plan, program.launches if program else None, recipe)
    config |= {"started_from": given.source} if given else {}
    spec = run_spec(plan, options, described=described, imports=imports)
    return PreparedTraining(algorithm, options, config, spec, program, display, evaluation, given)


def begin_training(
    prepared: PreparedTraining, hooks: Sequence[Hook] = (), *, watch: Callable[[Session], Session] = lambda s: s
) -> Run:
    """Creates the run of a training and trains; hooks, result and errors are those of `train`.

    Args:
        prepared: the training.
        hooks: called with events.
        watch: may put another session around that of the training.
    """
    algorithm, options, config, spec, program, display, evaluation, given = prepared
    run = create_run(config, options)
    display.note(f"run {run.root}")
    with contextlib.closing(display), run.lock(), open_checkpoints(run, options) as checkpoints:
        strides = [evaluation.every] if evaluation else []
        session = open_session(algorithm, program, spec, run, options, None, display, strides, given=given)
        return drive(
            watch(session), run, algorithm, options, display, checkpoints, None, hooks=hooks, evaluation=evaluation
        )


def resume(
    run_dir: str | Path,
    *,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
    quiet: bool = False,
    fusion: Fusion | None = None,
    changes: Mapping[str, Any] | None = None,
    stop_at_return: int | float | Literal["never"] | None = None,
    hooks: Sequence[Hook] = (),
    **placement: Any,
) -> Run:
    """Goes on with a run from its newest whole checkpoint; the result is that of a run never stopped.

    Args:
        run_dir: the run's directory.
        algorithm: the graph again, where the run was made with parts that only Python has.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: let this directory's run import the modules that it names, now and later; a run that was made here
            may do so without.
        quiet: show nothing while training.
        fusion: fuse otherwise than before, as where kernels cannot be made; numbers then differ by rounding.
        changes: hyperparameters that have other values from now on, such as `{"learning_rate": 1e-4}`, or a later
            `total_timesteps`; they are written down in the run's config.json.
        stop_at_return: another return to stop at than before, now and whenever the run goes on again; `never` for
            none.
        hooks: as for `train`; a run does not keep those that it had, nor what they remember.
        **placement: fields of `RunOptions` that say where to run, instead of where it ran before: devices,
            distribution, place, workers, actors, learners, asynchronous, gpu_sharing, plan, cluster, host; or how
            patiently: hang_seconds, start_seconds, max_failures.

    Raises:
        CheckpointError: if the directory is no run, no checkpoint is whole, or the newest was made with another
            configuration.
        UsageError: if the algorithm has other hyperparameters than the run, or a change cannot be made.
    """
    check_compiled()
    hooks = check_hooks(hooks)
    run = RunDirectory.open(fit("run_dir", Path, run_dir))
    if unknown := placement.keys() - {*PLACEMENT, *WORKER_LIMITS}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} cannot be changed when a run goes on; what can: "
            f"{PLACEMENT + WORKER_LIMITS}."
        )
    limits = {name: placement.pop(name) for name in WORKER_LIMITS if name in placement}
    before = replace(read_options(run), **limits)
    options = replace(before, quiet=quiet, fusion=fusion or before.fusion, **reset_placement(placement))
    if stop_at_return is not None:
        options = replace(options, stop_at_return=None if stop_at_return == "never" else stop_at_return)
    if (devices := settings_of(options).devices) is not None:  # kernels stay as the run began with them
        options = replace(options, devices=devices)
    plan = None if placement else _saved_plan(run)
    prepare_devices(options, plan=plan)
    saved, modules = read_saved(run), imports
    if algorithm is None:
        asks_policy = plan is None and not placement.keys() & {"distribution", "plan"}
        modules = approved_imports(run, saved, imports=imports, trust=trust, distribution=asks_policy)
    import_modules(modules)
    settings, values = changed_settings(saved.graph, changes or {}, where=str(run.config_file))
    graph = open_graph(settings, saved.imports, algorithm=algorithm, modules=modules)
    display = choose_display(quiet=quiet)
    with contextlib.closing(display), run.lock(), open_checkpoints(run, options) as checkpoints:
        check = partial(_check_checkpoint, run, graph, values)
        restored = checkpoints.restore(state_shapes(graph, options.seeds), check=check)
        if restored and restored.iteration >= graph.loops.iterations and (summary := read_summary(run)):
            display.note("this run is finished already; nothing was changed")
            return Run(run.root, summary, 0)
        described = _described(saved.graph, settings, graph, passed=algorithm is not None, display=display)
        custom = only_here(described, modules)
        plan, options = _placed(plan, graph, options, custom, keeps_fusion=fusion is None, display=display)
        tell_replay_size(graph, plan, options, display)
        given = given_weights(graph, options, modules, restored)
        evaluation = prepare_evaluation(graph, described, options, display)
        program = None
        if plan.place == "program":
            launches = None if placement or fusion else run.read_config().get("launches")
            program = compile_program(graph, plan, options, display, launches=launches)
        note_changes(run, described, graph, values, restored, display)  # now that nothing can be refused any more
        if options.stop_at_return != before.stop_at_return:
            note_option(run, "stop_at_return", options.stop_at_return)
        spec = run_spec(plan, options, described=described, imports=modules)
        strides = [evaluation.every] if evaluation else []
        session = open_session(graph, program, spec, run, options, restored, display, strides, given=given)
        return drive(
            session, run, graph, options, display, checkpoints, restored, hooks=hooks, evaluation=evaluation
        )


def _placed(
    saved: Plan | None,
    graph: Graph,
    options: RunOptions,
    custom: Sequence[str],
    *,
    keeps_fusion: bool,
    display: Display,
) -> tuple[Plan, RunOptions]:
    """Where a run goes on, and its options there.

    Kernels that it had in one program are not asked for in several, which have none.

    Args:
        saved: the plan that it had, where it stays in its place.
        graph: what is trained.
        options: with the new placement.
        custom: names of parts that are made in Python.
        keeps_fusion: True if fusion is the run's own, and nobody asks for it now.
        display: shows notes.
    """
    if saved is not None:
        return place_custom(saved, options, custom, saved=True), options
    if keeps_fusion and options.fusion in ("rollout", "full"):
        unfused = replace(options, fusion="auto")
        if choose_plan(graph, unfused).place != "program":
            display.note(f"note: fusion={options.fusion} needs one program; this run goes on without kernels")
            options = unfused
    return place_custom(choose_plan(graph, options), options, custom), options


def _check_checkpoint(
    run: RunDirectory, graph: Graph, values: dict[str, Any], iteration: int, metadata: dict[str, Any]
) -> None:
    check_identity(run, metadata, iteration, given=values)
    check_end(graph.loops, iteration, values)


def _described(
    saved: dict[str, Any], settings: dict[str, Any], graph: Graph, *, passed: bool, display: Display
) -> dict[str, Any]:
    """The graph as workers build it and the configuration records it; says where it is another than before."""
    described = describe(graph) if passed else {**settings, "fingerprint": fingerprint(graph)}
    if settings["config"] == saved["config"] and described["fingerprint"] != saved.get("fingerprint"):
        display.note("note: environment, network, algorithm or JAX are not what they were when this run started")
    return {"custom": [], **described}


def chosen_options(options: RunOptions | Mapping[str, Any] | None, overrides: dict[str, Any]) -> RunOptions:
    """The options with single ones replaced.

    Raises:
        UsageError: for names and values that are none.
    """
    hint = "Hyperparameters go to the algorithm: rollmill.ppo(env, num_envs=8)."
    if isinstance(options, Mapping):
        return chosen_options(None, {**options, **overrides})
    if not isinstance(options, RunOptions | None):
        raise UsageError(f"options is a {type(options).__name__}. hint: give rollmill.RunOptions(...). {hint}")
    check_names(RunOptions, overrides, what="option of train", hint=hint)
    return replace(options or RunOptions(), **overrides)


def check_algorithm(algorithm: Any) -> None:
    """Refuses what is not an algorithm on an environment.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(algorithm, Graph):
        return
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "")
    name = name if name in ALGORITHMS else "ppo"
    raise UsageError(
        f"expected an algorithm on an environment, got {algorithm!r:.60}. "
        f'hint: rollmill.{name}("CartPole-v1") makes one.'
    )


def reset_placement(placement: dict[str, Any]) -> dict[str, Any]:
    """Where a run goes on: what is asked for, and what that makes void of where it ran before."""
    default = asdict(PlacementOptions())
    if placement.keys() & {"distribution", "plan"}:  # what was said of the old policy is not said of this one
        of_policy = {name: value for name, value in default.items() if name not in ("devices", "gpu_sharing")}
        return {**of_policy, **placement}
    if placement.keys() & {"place", "cluster"}:  # one of them replaces both
        return {"place": None, "cluster": None, "host": None, **placement}
    return placement


def _saved_plan(run: RunDirectory) -> Plan | None:
    saved = read_saved(run).plan
    if saved is None:
        return None
    try:
        return Plan.from_json(saved)
    except UsageError as error:
        raise CheckpointError(f"{run.config_file}: plan: {error}") from error
