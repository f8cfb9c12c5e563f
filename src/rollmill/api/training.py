"""Trains a graph into a run directory, and goes on where a run stopped."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rollmill.api.deployment import PATIENCE, choose_plan, prepare_devices, refuse_custom
from rollmill.api.following import train_with_workers
from rollmill.api.options import PLACEMENT, PlacementOptions, RunOptions
from rollmill.api.recorder import Recorder, Run, open_checkpoints
from rollmill.api.specification import (
    check_same_config,
    config_from_json,
    describe,
    import_modules,
    only_here,
    rebuild_graph,
)
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.machine import git_commit, hardware, versions
from rollmill.dataflow import Graph, fingerprint
from rollmill.execution import (
    Fusion,
    Launches,
    Program,
    Window,
    advance,
    enable_compilation_cache,
    lower,
    stop_at_fault,
    take_devices,
    telling_memory,
)
from rollmill.planning import Plan
from rollmill.record import (
    Display,
    MetricsLog,
    RunDirectory,
    StopRequest,
    choose_display,
    name_run,
    stop_on_signals,
)


def train(
    algorithm: Graph, options: RunOptions | None = None, *, imports: Sequence[str] = (), **overrides: Any
) -> Run:
    """Trains an algorithm and records the run.

    Args:
        algorithm: a graph, such as `rollmill.ppo(env)`.
        options: how to run it; single ones can be given as keywords: `train(algorithm, seed=3)`.
        imports: modules that registered the environment, noted for whoever resumes the run.
        **overrides: fields of `RunOptions` to replace.

    Returns:
        The run's directory and its summary.

    Raises:
        UsageError: for options that cannot be used; nothing was written then.
        NonFiniteError: if a loss, gradient, weight, observation or reward is not finite.
        StorageError: if the run cannot be written any further; it can be resumed.
    """
    options = replace(options or RunOptions(), **overrides)
    if options.run_dir is not None:
        RunDirectory.refuse_occupied(Path(options.run_dir))
    described = describe(algorithm)
    plan = choose_plan(algorithm, options, custom=only_here(described, imports))
    display = choose_display(quiet=options.quiet)
    if plan.place != "program":
        run = _create(described, options, imports, plan)
        display.note(f"run {run.root}")
        return train_with_workers(run, algorithm, plan, options, display, described=described, imports=imports)
    program = _compile(algorithm, plan, options, display)
    run = _create(described, options, imports, plan, launches=program.launches)
    display.note(f"run {run.root}")
    return _train(run, algorithm, program, options, display)


def resume(
    run_dir: str | Path,
    *,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    quiet: bool = False,
    fusion: Fusion | None = None,
    **placement: Any,
) -> Run:
    """Goes on with a run from its newest whole checkpoint; the result is that of a run never stopped.

    Args:
        run_dir: the run's directory.
        algorithm: the graph again, where the run was made with parts that only Python has.
        imports: modules to import first, because they register the environment.
        quiet: show nothing while training.
        fusion: fuse otherwise than before, as where kernels cannot be made; numbers then differ by rounding.
        **placement: fields of `RunOptions` that say where to run, instead of where it ran before: devices,
            distribution, place, workers, actors, learners, asynchronous, plan, cluster, host; or how patiently:
            hang_seconds, start_seconds, max_failures.

    Raises:
        CheckpointError: if the directory is no run, or no checkpoint is whole.
        UsageError: if the algorithm has other hyperparameters than the run.
    """
    run = RunDirectory.open(Path(run_dir))
    if unknown := placement.keys() - {*PLACEMENT, *PATIENCE}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} cannot be changed when a run goes on; what can: {PLACEMENT + PATIENCE}."
        )
    patience = {name: placement.pop(name) for name in PATIENCE if name in placement}
    before = replace(read_options(run), **patience)
    options = replace(before, quiet=quiet, fusion=fusion or before.fusion, **placed_anew(placement))
    prepare_devices(options, plan=None if placement else _saved_plan(run))
    passed, saved = algorithm, run.read_config()["graph"]
    algorithm, _ = reopen(run, algorithm=algorithm, imports=imports)
    described = {**saved, "fingerprint": fingerprint(algorithm)} if passed is None else describe(algorithm)
    display = choose_display(quiet=quiet)
    if described["fingerprint"] != saved.get("fingerprint"):
        display.note("note: environment, network, algorithm or JAX are not what they were when this run started")
    custom = only_here(described, imports)
    plan = (None if placement else _saved_plan(run)) or choose_plan(algorithm, options, custom=custom)
    refuse_custom(plan, custom)
    if plan.place != "program":
        return train_with_workers(run, algorithm, plan, options, display, described=described, imports=imports)
    launches = None if placement or fusion else run.read_config().get("launches")
    program = _compile(algorithm, plan, options, display, launches=launches)
    return _train(run, algorithm, program, options, display)


def placed_anew(placement: dict[str, Any]) -> dict[str, Any]:
    """Where a run goes on: what is asked for, and what that makes void of where it ran before."""
    default = asdict(PlacementOptions())
    if placement.keys() & {"distribution", "plan"}:  # what was said of the old policy is not said of this one
        return {**{name: value for name, value in default.items() if name != "devices"}, **placement}
    if placement.keys() & {"place", "cluster"}:  # one of them replaces both
        return {"place": None, "cluster": None, "host": None, **placement}
    return placement


def reopen(
    run: RunDirectory, *, algorithm: Graph | None = None, imports: Sequence[str] = ()
) -> tuple[Graph, RunOptions]:
    """The algorithm and the options that a run was started with.

    Raises:
        UsageError: if `algorithm` has other hyperparameters.
    """
    config, options = run.read_config(), read_options(run)
    import_modules(imports)
    if algorithm is None:
        return rebuild_graph(config["graph"], imported=config["imports"]), options
    check_same_config(algorithm, config["graph"])
    return algorithm, options


def read_options(run: RunDirectory) -> RunOptions:
    """The options that a run was started with.

    Raises:
        CheckpointError: if its configuration is not one of this version.
    """
    config = run.read_config()
    if missing := {"graph", "options", "imports"} - config.keys():
        raise CheckpointError(f"{run.config_file} has no {', '.join(sorted(missing))}; is it a run of Rollmill?")
    return replace(config_from_json(RunOptions, config["options"]), run_dir=run.root)


def _create(
    described: dict[str, Any],
    options: RunOptions,
    imports: Sequence[str],
    plan: Plan,
    *,
    launches: Launches | None = None,
) -> RunDirectory:
    """The run's directory; a name that the user did not choose gives way to one that exists."""
    config, provenance = _config(described, options, imports, plan, launches), _provenance()
    if options.run_dir is not None:
        return RunDirectory.create(Path(options.run_dir), config=config, versions=provenance)
    root = name_run(described["algorithm"], described["environment"], seed=options.seed, now=datetime.now())
    for name in (root.name, *(f"{root.name}-{n}" for n in range(2, 100))):
        with contextlib.suppress(UsageError):
            return RunDirectory.create(root.with_name(name), config=config, versions=provenance)
    return RunDirectory.create(root, config=config, versions=provenance)


def _config(
    described: dict[str, Any], options: RunOptions, imports: Sequence[str], plan: Plan, launches: Launches | None
) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(options).items() if name not in ("run_dir", "quiet", "plan")}
    return {
        "graph": described,
        "options": kept,
        "imports": list(imports),
        "plan": plan.to_json(),
        "launches": launches,
    }


def _saved_plan(run: RunDirectory) -> Plan | None:
    saved = run.read_config().get("plan")
    return None if saved is None else Plan.from_json(saved)


def _provenance() -> dict[str, Any]:
    return {"versions": versions(), "hardware": hardware(), "commit": git_commit()}


def _compile(
    algorithm: Graph, plan: Plan, options: RunOptions, display: Display, *, launches: Launches | None = None
) -> Program:
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


def _train(run: RunDirectory, algorithm: Graph, program: Program, options: RunOptions, display: Display) -> Run:
    with (
        contextlib.closing(display),
        telling_memory(algorithm.loops),
        run.lock(),
        stop_on_signals() as stop,
        open_checkpoints(run, options) as checkpoints,
    ):
        restored = checkpoints.restore(program.state)
        first = restored.iteration if restored else 0
        if first >= algorithm.loops.iterations and run.read_summary() is not None:
            display.note("this run is finished already; nothing was changed")
            return Run(run.root, run.read_summary() or {}, 0)
        state = program.place(restored.state) if restored else program.start()
        with MetricsLog(run, tensorboard=options.tensorboard, resume_from=first) as log:
            recorder = Recorder(run, algorithm, options, program.compile_seconds, checkpoints, log, display)
            recorder.begin(restored, state)
            windows = advance(
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
    program: Program,
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
