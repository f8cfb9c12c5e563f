"""Resumes a run from its newest intact checkpoint, with the same placement or another."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from typing import Any, Literal, NamedTuple

from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.interruption import handling_early_notices, pass_on_interrupt
from rollmill.core.schema import coerce
from rollmill.core.stored_paths import RunPath
from rollmill.dataflow import Graph, fingerprint
from rollmill.gpus.jax_settings import check_compiled
from rollmill.hooks import Hook
from rollmill.planning.choose import settings_of
from rollmill.planning.placement import PLACEMENT, PlacementOptions
from rollmill.planning.plan import Plan
from rollmill.programs.kernels import Fusion
from rollmill.programs.states import held_leaves, state_shapes
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.display import Display, choose_display
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.changes import changed_settings, check_end, note_changes, note_import_files, note_option
from rollmill.runs.earlier_versions import note_of_versions
from rollmill.runs.options import WORKER_LIMITS, RunOptions
from rollmill.runs.reopening import open_graph
from rollmill.runs.saved_run import check_identity, read_options, read_saved, read_summary
from rollmill.runs.specification import describe, import_modules
from rollmill.runs.trust import approved_imports, check_cluster, check_start
from rollmill.training.driver import check_tracking, copy_to_store, drive
from rollmill.training.hook_calls import check_hooks
from rollmill.training.initial_weights import GivenWeights, given_weights
from rollmill.training.placing import choose_plan, prepare_devices
from rollmill.training.preparing import PlannedTraining, prepare
from rollmill.training.recorder import Run, open_checkpoints


@handling_early_notices()
def resume(
    run_dir: str | PathLike[str],
    *,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
    track: Sequence[str] = (),
    dashboard: bool = True,
    quiet: bool = False,
    fusion: Fusion | None = None,
    changes: Mapping[str, Any] | None = None,
    stop_at_return: int | float | Literal["never"] | None = None,
    hooks: Sequence[Hook] = (),
    **placement: Any,
) -> Run:
    """Resumes a run from its newest complete checkpoint, with the same result as an uninterrupted run.

    Args:
        run_dir: directory of the run.
        algorithm: the graph, which must be passed again if the run was created with parts that only Python knows.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow this run directory to import the modules that it names, now and later. A run that was created
            on this machine may always import them.
        track: trackers, as for `train`. A run does not store them.
        dashboard: show a dashboard with losses and returns at the bottom of the terminal, instead of a progress
            bar.
        quiet: show nothing while training.
        fusion: a different value of `fusion`, for a machine that cannot make the original kernels. Results then
            differ by rounding.
        changes: new values of hyperparameters, such as `{"learning_rate": 1e-4}`, or a larger `total_timesteps`.
            The run's config.json records them.
        stop_at_return: another mean return at which to stop, now and whenever the run is resumed, or `never`.
        hooks: hooks, as for `train`. A run stores neither hooks nor their internal state.
        **placement: fields of `RunOptions` that change where the run trains: devices, distribution, place,
            workers, actors, learners, asynchronous, gpu_sharing, reduction, plan, cluster and host. Limits of
            workers are also accepted: hang_seconds, start_seconds and max_failures.

    Raises:
        CheckpointError: the directory is not a run, no checkpoint is complete, or the newest checkpoint has
            another configuration.
        UsageError: the algorithm has other hyperparameters than the run, or a change cannot be made.
        Interrupted: Ctrl-C was pressed, as for `train`.

    Examples:
        >>> rollmill.resume("runs/cartpole", changes={"total_timesteps": 1_000_000})
    """
    check_compiled()
    hooks = check_hooks(hooks)
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    limits, where = _limits_and_place(placement)
    before = replace(read_options(run), **limits)
    shown = {"track": tuple(track), "quiet": quiet, "dashboard": dashboard}
    options = _options_now(before, where, fusion=fusion, stop_at_return=stop_at_return, **shown)
    elsewhere = bool(where or fusion)
    saved_plan = None if where else _read_saved_plan(run)
    prepare_devices(options, plan=saved_plan)
    asks_policy = saved_plan is None and not where.keys() & {"distribution", "plan"}
    # without these options, the saved cluster is used
    if not where.keys() & {"distribution", "plan", "place", "cluster"}:
        check_cluster(run, read_saved(run), trust=trust)
    reopened = _reopen(run, algorithm, imports, changes or {}, trust=trust, asks_policy=asks_policy)
    graph, display = reopened.graph, choose_display(quiet=quiet, dashboard=dashboard)
    with (
        contextlib.closing(display),
        run.lock(),
        copy_to_store(run, options, display),
        open_checkpoints(run, options) as checkpoints,
    ):
        restored = _restore(run, checkpoints, reopened, options)
        if finished := _if_finished(run, graph, restored):
            display.note("this run has already finished. Nothing was changed.")
            return finished
        if restored and not options.checkpoint_environments:
            display.note("note: checkpoint_environments=False, so all environments begin new episodes")
        if note := note_of_versions(run):
            display.note(note)
        described, plan = _describe(reopened, display), saved_plan
        if plan is None:
            plan, options = _plan_elsewhere(graph, options, keeps_fusion=fusion is None, display=display)
        same_kernels = not elsewhere and "num_minibatches" not in reopened.values
        planned = PlannedTraining(
            graph,
            described,
            options,
            plan,
            imports=reopened.modules,
            given=None if restored else _first_weights(run, graph, options, reopened.modules, trust=trust),
            launches=run.read_config().get("launches") if same_kernels else None,
            goes_on_in_place=saved_plan is not None,
        )
        prepared = prepare(planned, restored, display)
        # All checks are done, so the changes can be recorded.
        note_changes(run, described, graph, reopened.values, restored, display)
        note_import_files(run, prepared.config["import_files"])
        if options.stop_at_return != before.stop_at_return:
            note_option(run, "stop_at_return", options.stop_at_return)
        if not elsewhere and prepared.program and prepared.program.reduction:
            note_option(run, "reduction", prepared.program.reduction)
        return pass_on_interrupt(drive(prepared, run, checkpoints, hooks=hooks, keeps_choices=not elsewhere))


def _first_weights(
    run: RunDirectory, graph: Graph, options: RunOptions, modules: Sequence[str], *, trust: bool
) -> GivenWeights | None:
    """Returns the initial weights of a run without a checkpoint, if they are not random."""
    check_start(run, read_saved(run), trust=trust)
    given = given_weights(graph, options, modules)
    digest = run.read_config().get("started_from", {}).get("sha256")
    if given is not None and given.source.get("sha256") != digest:
        raise CheckpointError(
            f"the recording {options.clone} has changed since {run.root} started from it, and there is no "
            "checkpoint yet. hint: restore the file, or start a new run."
        )
    return given


class _Reopened(NamedTuple):
    """A run opened again."""

    graph: Graph
    saved: dict[str, Any]
    """Settings of the graph, as config.json has them."""
    settings: dict[str, Any]
    """The same with the hyperparameters that are changed now."""
    values: dict[str, Any]
    """Those hyperparameters."""
    modules: tuple[str, ...]
    """Modules that other processes import first."""
    passed: bool
    """True if the user passed the graph again."""


def _limits_and_place(placement: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options for timeouts and placement of workers."""
    if unknown := placement.keys() - {*PLACEMENT, *WORKER_LIMITS}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} cannot be changed in a resumed run. These can be changed: "
            f"{PLACEMENT + WORKER_LIMITS}."
        )
    limits = {name: value for name, value in placement.items() if name in WORKER_LIMITS}
    return limits, {name: value for name, value in placement.items() if name not in WORKER_LIMITS}


def _options_now(
    before: RunOptions,
    where: dict[str, Any],
    *,
    fusion: Fusion | None,
    stop_at_return: int | float | Literal["never"] | None,
    **shown: Any,
) -> RunOptions:
    """Returns the options of a resumed run, with the devices of the plan that they name."""
    options = replace(before, fusion=fusion or before.fusion, memory_fraction=None, **shown)
    check_tracking(options)
    options = replace(options, **reset_placement(where))
    if (devices := settings_of(options).devices) is not None:
        options = replace(options, devices=devices)
    if stop_at_return is not None:
        options = replace(options, stop_at_return=None if stop_at_return == "never" else stop_at_return)
    return options


def _reopen(
    run: RunDirectory,
    algorithm: Graph | None,
    imports: Sequence[str],
    changes: Mapping[str, Any],
    *,
    trust: bool,
    asks_policy: bool,
) -> _Reopened:
    """Returns the graph of a run with the hyperparameters changed now, and the parts to build it elsewhere."""
    saved, modules = read_saved(run), tuple(imports)
    if algorithm is None:
        modules = approved_imports(run, saved, imports=imports, trust=trust, distribution=asks_policy)
    import_modules(modules)
    settings, values = changed_settings(saved.graph, changes, where=str(run.config_file))
    graph = open_graph(settings, saved.imports, algorithm=algorithm, modules=modules)
    return _Reopened(graph, saved.graph, settings, values, modules, passed=algorithm is not None)


def _restore(
    run: RunDirectory, checkpoints: Checkpoints, reopened: _Reopened, options: RunOptions
) -> Restored | None:
    check = partial(_check_checkpoint, run, reopened.graph, reopened.values)
    shapes = state_shapes(reopened.graph, options.seeds)
    return checkpoints.restore(shapes, check=check, given=held_leaves(reopened.graph, shapes.key.shape))


def _check_checkpoint(
    run: RunDirectory, graph: Graph, values: dict[str, Any], iteration: int, metadata: dict[str, Any]
) -> None:
    check_identity(run, metadata, iteration, given=values)
    check_end(graph.loops, iteration, values)


def _if_finished(run: RunDirectory, graph: Graph, restored: Restored | None) -> Run | None:
    """Returns the run if all of its iterations are done, and otherwise None."""
    if restored is None or restored.iteration < graph.loops.iterations:
        return None
    summary = read_summary(run)
    return Run(run.root, summary, 0) if summary else None


def _describe(reopened: _Reopened, display: Display) -> dict[str, Any]:
    """Returns the graph as workers build it and the configuration records it, and logs differences from before."""
    graph, saved, settings = reopened.graph, reopened.saved, reopened.settings
    described = describe(graph) if reopened.passed else {**settings, "fingerprint": fingerprint(graph)}
    if settings["config"] == saved["config"] and described["fingerprint"] != saved.get("fingerprint"):
        display.note("note: the environment, the network, the algorithm or JAX has changed since this run started")
    return {"custom": [], **described}


def _plan_elsewhere(
    graph: Graph, options: RunOptions, *, keeps_fusion: bool, display: Display
) -> tuple[Plan, RunOptions]:
    """Chooses the plan of a run that resumes in another place, and returns its new options.

    Kernels that the new place does not support are dropped, unless the user requests them.
    """
    without = replace(options, fusion="auto") if keeps_fusion else options
    plan = choose_plan(graph, without)
    try:
        return choose_plan(graph, options), options
    except UsageError:
        if not keeps_fusion:
            raise
        display.note(f"note: fusion={options.fusion} is not possible here. This run continues with fusion=auto")
        return plan, without


def reset_placement(placement: dict[str, Any]) -> dict[str, Any]:
    """Returns the placement options of a resumed run, in which requested options replace the recorded ones."""
    default = asdict(PlacementOptions())
    if placement:  # the fastest all-reduce there may not be the fastest here
        placement = {"reduction": default["reduction"], **placement}
    # options for the old distribution policy do not apply to the new policy
    if placement.keys() & {"distribution", "plan"}:
        of_policy = {name: value for name, value in default.items() if name not in ("devices", "gpu_sharing")}
        return {**of_policy, **placement}
    if placement.keys() & {"place", "cluster"}:  # each of them replaces both
        return {"place": None, "cluster": None, "host": None, **placement}
    return placement


def _read_saved_plan(run: RunDirectory) -> Plan | None:
    saved = read_saved(run).plan
    if saved is None:
        return None
    try:
        return Plan.from_json(saved)
    except UsageError as error:
        raise CheckpointError(f"{run.config_file}: plan: {error}") from error
