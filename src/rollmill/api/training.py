"""Trains a graph into a run directory, and goes on where a run stopped."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.api.changes import changed_settings, check_end, note_changes
from rollmill.api.deployment import PATIENCE, choose_plan, prepare_devices, refuse_custom, refuse_unread
from rollmill.api.following import train_with_workers
from rollmill.api.options import PLACEMENT, PlacementOptions, RunOptions
from rollmill.api.recorder import Recorder, Run, open_checkpoints
from rollmill.api.reopening import open_graph
from rollmill.api.saved_run import check_identity, read_options, read_saved, read_summary
from rollmill.api.specification import ALGORITHMS, describe, import_modules, only_here
from rollmill.api.trust import approved_imports, named_modules, remember
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.fields import check_names, fit
from rollmill.core.jax_settings import check_compiled
from rollmill.core.machine import git_commit, hardware, own_commit, versions
from rollmill.dataflow import Graph, fingerprint
from rollmill.execution import (
    CompiledProgram,
    Fusion,
    Launches,
    Window,
    dispatch_ahead,
    enable_compilation_cache,
    lower,
    state_shapes,
    stop_at_fault,
    take_devices,
    telling_memory,
)
from rollmill.planning import Plan
from rollmill.record import (
    Checkpoints,
    Display,
    MetricsLog,
    Restored,
    RunDirectory,
    StopRequest,
    choose_display,
    name_run,
    stop_on_signals,
)


def train(
    algorithm: Graph,
    options: RunOptions | Mapping[str, Any] | None = None,
    *,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    **overrides: Any,
) -> Run:
    """Trains an algorithm and records the run.

    Args:
        algorithm: a graph, such as `rollmill.ppo(env)`.
        options: how to run it; single ones can be given as keywords: `train(algorithm, seed=3)`.
        imports: modules that registered the environment, noted for whoever resumes the run.
        recipe: name of the recipe that the hyperparameters come from, noted for readers of the run.
        **overrides: fields of `RunOptions` to replace.

    Returns:
        The run's directory and its summary.

    Raises:
        UsageError: for options that cannot be used; nothing was written then.
        NonFiniteError: if a loss, gradient, weight, observation or reward is not finite.
        StorageError: if the run cannot be written any further; it can be resumed.
    """
    check_compiled()
    check_algorithm(algorithm)
    options = chosen_options(options, overrides)
    if options.run_dir is not None:
        RunDirectory.refuse_occupied(Path(options.run_dir))
    described = describe(algorithm)
    plan = choose_plan(algorithm, options, custom=only_here(described, imports))
    refuse_unread(plan, options)
    RunDirectory.check_parent(_root(described, options))
    display = choose_display(quiet=options.quiet)
    program = _compile(algorithm, plan, options, display) if plan.place == "program" else None
    config = _config(described, options, imports, plan, program.launches if program else None, recipe)
    run = _create(config, options)
    display.note(f"run {run.root}")
    with contextlib.closing(display), run.lock(), open_checkpoints(run, options) as checkpoints:
        if program is not None:
            return _train(run, algorithm, program, options, display, checkpoints, None)
        return train_with_workers(
            run, algorithm, plan, options, display, checkpoints, None, described=described, imports=imports
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
    **placement: Any,
) -> Run:
    """Goes on with a run from its newest whole checkpoint; the result is that of a run never stopped.

    Args:
        run_dir: the run's directory.
        algorithm: the graph again, where the run was made with parts that only Python has.
        imports: modules to import first, because they register the environment.
        trust: let this directory's run import the modules that it names, now and later; a run that was made here
            may do so without.
        quiet: show nothing while training.
        fusion: fuse otherwise than before, as where kernels cannot be made; numbers then differ by rounding.
        changes: hyperparameters that have other values from now on, such as `{"learning_rate": 1e-4}`, or a later
            `total_timesteps`; they are written down in the run's config.json.
        **placement: fields of `RunOptions` that say where to run, instead of where it ran before: devices,
            distribution, place, workers, actors, learners, asynchronous, plan, cluster, host; or how patiently:
            hang_seconds, start_seconds, max_failures.

    Raises:
        CheckpointError: if the directory is no run, no checkpoint is whole, or the newest was made with another
            configuration.
        UsageError: if the algorithm has other hyperparameters than the run, or a change cannot be made.
    """
    check_compiled()
    run = RunDirectory.open(fit("run_dir", Path, run_dir))
    if unknown := placement.keys() - {*PLACEMENT, *PATIENCE}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} cannot be changed when a run goes on; what can: {PLACEMENT + PATIENCE}."
        )
    patience = {name: placement.pop(name) for name in PATIENCE if name in placement}
    before = replace(read_options(run), **patience)
    options = replace(before, quiet=quiet, fusion=fusion or before.fusion, **placed_anew(placement))
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
        plan = plan or choose_plan(graph, options, custom=custom)
        refuse_custom(plan, custom)
        program = None
        if plan.place == "program":
            launches = None if placement or fusion else run.read_config().get("launches")
            program = _compile(graph, plan, options, display, launches=launches)
        note_changes(run, described, graph, values, restored, display)  # now that nothing can be refused any more
        if program is not None:
            return _train(run, graph, program, options, display, checkpoints, restored)
        return train_with_workers(
            run, graph, plan, options, display, checkpoints, restored, described=described, imports=modules
        )


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


def placed_anew(placement: dict[str, Any]) -> dict[str, Any]:
    """Where a run goes on: what is asked for, and what that makes void of where it ran before."""
    default = asdict(PlacementOptions())
    if placement.keys() & {"distribution", "plan"}:  # what was said of the old policy is not said of this one
        return {**{name: value for name, value in default.items() if name != "devices"}, **placement}
    if placement.keys() & {"place", "cluster"}:  # one of them replaces both
        return {"place": None, "cluster": None, "host": None, **placement}
    return placement


def _create(config: dict[str, Any], options: RunOptions) -> RunDirectory:
    """The run's directory; a name that the user did not choose gives way to one that exists."""
    root, provenance = _root(config["graph"], options), _provenance()
    names = (root.name, *(f"{root.name}-{n}" for n in range(2, 100))) if options.run_dir is None else ()
    run = None
    for name in names:
        with contextlib.suppress(UsageError):
            run = RunDirectory.create(root.with_name(name), config=config, versions=provenance)
            break
    run = run or RunDirectory.create(root, config=config, versions=provenance)
    remember(run, [named.module for named in named_modules(read_saved(run), distribution=True)])
    return run


def _root(described: dict[str, Any], options: RunOptions) -> Path:
    if options.run_dir is not None:
        return Path(options.run_dir)
    return name_run(described["algorithm"], described["environment"], seed=options.seed, now=datetime.now())


def _config(
    described: dict[str, Any],
    options: RunOptions,
    imports: Sequence[str],
    plan: Plan,
    launches: Launches | None,
    recipe: str | None,
) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(options).items() if name not in ("run_dir", "quiet", "plan")}
    return {
        "graph": described,
        "options": kept,
        "imports": list(imports),
        "plan": plan.to_json(),
        "launches": launches,
        "recipe": recipe,
        "command": sys.argv,
    }


def _saved_plan(run: RunDirectory) -> Plan | None:
    saved = read_saved(run).plan
    if saved is None:
        return None
    try:
        return Plan.from_json(saved)
    except UsageError as error:
        raise CheckpointError(f"{run.config_file}: plan: {error}") from error


def _provenance() -> dict[str, Any]:
    commits = {"rollmill": own_commit(), "working_directory": git_commit()}
    return {"versions": versions(), "hardware": hardware(), "commits": commits}


def _compile(
    algorithm: Graph, plan: Plan, options: RunOptions, display: Display, *, launches: Launches | None = None
) -> CompiledProgram:
    enable_compilation_cache()
    replicas = plan.partition.groups[0].replicas
    devices = take_devices(replicas if replicas > 1 else options.devices)
    display.note("compiling ...")
    with telling_memory(algorithm.loops):
        program = lower(
            algorithm,
            seeds=options.seeds,
            devices=devices,
            unroll=options.unroll,
            fusion=options.fusion,
            numerics=options.numerics,
            launches=launches,
        )
    for note in program.notes:
        display.note(note)
    where = f"{len(devices)} x {devices[0].device_kind}"
    display.note(f"compiled in {program.compile_seconds:.1f} s for {where}")
    return program


def _train(
    run: RunDirectory,
    algorithm: Graph,
    program: CompiledProgram,
    options: RunOptions,
    display: Display,
    checkpoints: Checkpoints,
    restored: Restored | None,
) -> Run:
    first = restored.iteration if restored else 0
    with telling_memory(algorithm.loops), stop_on_signals() as stop:
        state = program.place(restored.state) if restored else program.start()
        with MetricsLog(run, tensorboard=options.tensorboard, resume_from=first) as log:
            recorder = Recorder(run, algorithm, options, program.compile_seconds, checkpoints, log, display)
            recorder.begin(restored, state)
            windows = dispatch_ahead(
                program,
                state,
                first=first,
                until=algorithm.loops.iterations,
                stride=options.checkpoint_iterations,
            )
            _follow(windows, run, algorithm, program, recorder, stop)
        checkpoints.wait()
        summary = recorder.finish(stopped_by=stop.signal_name)
    return Run(run.root, summary, stop.exit_code if summary["status"] == "stopped" else 0)


def _follow(
    windows: Iterator[Window],
    run: RunDirectory,
    algorithm: Graph,
    program: CompiledProgram,
    recorder: Recorder,
    stop: StopRequest,
) -> None:
    for window in windows:
        recorder.record(window.first, window.metrics)
        stop_at_fault(algorithm, program, window, run.fault)
        stopping = stop.requested
        recorder.save_if_due(window.last, window.after, now=stopping)
        if stopping:
            return
