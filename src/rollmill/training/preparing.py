"""Checks and places a training run, and compiles the programs of this process.

These functions serve new runs, resumed runs, trials of sweeps and plan searches, and profiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from rollmill.core.machine import return_freed_memory
from rollmill.dataflow import Graph
from rollmill.gpus.memory_limit import memory_notes
from rollmill.planning.plan import AllReduceOption, Plan
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import CompiledProgram, check_devices, lower
from rollmill.programs.devices import explain_out_of_memory, take_devices
from rollmill.programs.kernels import KernelPlace, Launches, is_too_short, kernel_parts
from rollmill.programs.memory_needs import (
    check_message_size,
    check_replay_size,
    claim_before_compiling,
    claim_compiled,
    replay_size,
)
from rollmill.programs.meshes import mesh_of
from rollmill.record.checkpoints import Restored
from rollmill.record.display import Display
from rollmill.runs.creation import run_config
from rollmill.runs.custom_names import note_of_unknown, only_here, with_own_modules
from rollmill.runs.options import RunOptions
from rollmill.training.action_coverage import notes_on_far_actions
from rollmill.training.evaluations import PeriodicEvaluation, check_return_of, prepare_evaluation
from rollmill.training.initial_weights import GivenWeights
from rollmill.training.known_failures import note_on_known_failure
from rollmill.training.placing import place_parts
from rollmill.workers.run_spec import (
    ClusterSettings,
    GpuSettings,
    GraphRecipe,
    KernelSettings,
    RunSpec,
    Tolerances,
)

if TYPE_CHECKING:
    from rollmill.programs.all_reduce_choice import AllReduceChoice

GRAPH_FACTORY = "rollmill.runs.specification:graph_of_worker"


@dataclass(frozen=True)
class PlannedTraining:
    """A training request together with its graph and plan, before compilation."""

    graph: Graph
    described: dict[str, Any]
    """Settings of the graph, as `describe` returns them."""
    options: RunOptions
    plan: Plan
    imports: tuple[str, ...] = ()
    """Modules that the user names, because they register the environment, network or algorithm."""
    recipe: str | None = None
    """Name of the recipe that the hyperparameters come from, for readers of the run."""
    given: GivenWeights | None = None
    """Initial weights that replace random ones, or None."""
    launches: Launches | None = None
    """Launch configurations of the kernels, as chosen when the run began."""
    goes_on_in_place: bool = False
    """True if a run is resumed with the plan that it already had."""


@dataclass(frozen=True)
class PreparedTraining:
    """A checked and compiled training run, ready to begin."""

    algorithm: Graph
    options: RunOptions
    config: dict[str, Any]
    """The content of config.json for a new run."""
    spec: RunSpec
    program: CompiledProgram | None
    """The compiled program of the whole run, or None if workers train."""
    display: Display
    evaluation: PeriodicEvaluation | None = None
    """Evaluates the run's policy while it trains, or None."""
    given: GivenWeights | None = None
    restored: Restored | None = None
    """The checkpoint from which the run resumes, or None for a new run."""


def prepare(
    planned: PlannedTraining, restored: Restored | None, display: Display, *, shared: CompiledProgram | None = None
) -> PreparedTraining:
    """Places and compiles a training run, and shows notes to the user.

    Args:
        planned: the run.
        restored: the checkpoint from which the run resumes, or None for a new run.
        display: shows the notes.
        shared: program that computes this run together with others. The caller then shows the common notes and
            checks the size of the replay memory. Default: a separate program is compiled.

    Raises:
        UsageError: the run cannot be trained in this way.
        DeviceMemoryError: other processes hold the device memory that the run needs.
    """
    graph, described, options = planned.graph, planned.described, planned.options
    check_return_of(graph, options)
    modules = with_own_modules(planned.imports, described)
    custom = only_here(described, modules)
    plan = place_parts(planned.plan, options, custom, display, saved=planned.goes_on_in_place)
    given = planned.given if restored is None else None
    is_new = restored is None and shared is None
    failure = None if given else note_on_known_failure(graph)
    of_new = (failure, *notes_on_far_actions(graph)) if is_new else ()
    for note in (note_of_unknown(described, modules), given and str(given), *of_new):
        if note:
            display.note(note)
    if shared is None:
        note_replay_size(graph, plan, display, num_seeds=len(options.seeds))
    evaluation = prepare_evaluation(graph, described, options, display)
    program, launches = None, planned.launches
    if plan.place not in ("program", "mesh"):
        check_group_kernels(graph, plan, options, display)
    if plan.place == "program":
        program = shared or compile_program(graph, plan, options, display, launches)
        options = replace(options, reduction=program.reduction) if program.reduction else options
        launches = program.launches
    config = run_config(described, options, modules, plan, launches, planned.recipe)
    config |= given.record if given else {}
    spec = run_spec(plan, options, described=described, imports=modules, launches=launches)
    return PreparedTraining(graph, options, config, spec, program, display, evaluation, given, restored)


def run_spec(
    plan: Plan,
    options: RunOptions,
    *,
    described: dict[str, Any],
    imports: Sequence[str],
    launches: Launches | None = None,
) -> RunSpec:
    """Returns the run specification that each worker receives.

    `described` is the description of the run's graph. Workers first import the modules in `imports`. `launches`
    are the launch configurations of kernels, if the run has already chosen them.
    """
    return RunSpec(
        graph=GraphRecipe(GRAPH_FACTORY, described, tuple(imports)),
        plan=plan.to_json(),
        platform=jax.default_backend(),
        seed=options.seed,
        unroll=options.unroll,
        checksums=options.checksums,
        kernels=KernelSettings(
            fusion=options.fusion,
            numerics=options.numerics,
            launches=dict(launches) if launches else None,
        ),
        tolerances=Tolerances(options.hang_seconds, options.start_seconds, options.max_failures),
        gpus=GpuSettings(options.gpu_sharing, options.reduction),
        cluster=ClusterSettings(options.cluster, options.host),
    )


def compile_program(
    graph: Graph,
    plan: Plan,
    options: RunOptions,
    display: Display,
    launches: Launches | None = None,
    *,
    seeds: Sequence[int] | None = None,
    lanes: Sequence[Graph] | None = None,
    in_turns: bool = False,
) -> CompiledProgram:
    """Compiles an iteration for the devices of a plan that has only one group.

    `launches` are the launch configurations of kernels, if the run has already chosen them. `seeds` replace the
    seeds of the options. `lanes` are graphs with the hyperparameters of each lane. For `in_turns`, see
    `programs.compiled.lower`.
    """
    seeds = options.seeds if seeds is None else seeds
    enable_compilation_cache()
    replicas = plan.partition.groups[0].replicas
    devices = take_devices(replicas if replicas > 1 else options.devices)
    check_devices(graph.loops, len(devices))
    for note in memory_notes():
        display.note(note)
    claim_before_compiling(graph, seeds=seeds, devices=devices)
    display.note("compiling ...")
    with explain_out_of_memory(graph.loops):
        means = _choose_means(graph, devices, "flat" if len(seeds) > 1 else options.reduction)
        program = lower(
            graph,
            seeds=seeds,
            lanes=lanes,
            in_turns=in_turns,
            devices=devices,
            mean=means and means.mean,
            unroll=options.unroll,
            fusion=options.fusion,
            numerics=options.numerics,
            launches=launches,
        )
    claim_compiled(graph, program)
    return_freed_memory()  # compiling can use more memory than the run
    for note in (*program.notes, *(means.notes if means else ())):
        display.note(note)
    where = f"{len(devices)} x {devices[0].device_kind}"
    again = f". The next start lowers it again, because {program.not_stored}" if program.not_stored else ""
    display.note(f"compiled in {program.compile_seconds:.1f} s for {where}{again}")
    return program._replace(reduction=means and means.way)


def _choose_means(graph: Graph, devices: Sequence[Any], wanted: AllReduceOption) -> "AllReduceChoice | None":
    """Returns the all-reduce between the devices, or None for a single device."""
    if len(devices) == 1:
        return None
    from rollmill.programs.all_reduce_choice import choose_all_reduce

    return choose_all_reduce(graph, mesh_of(devices), wanted)


def check_group_kernels(graph: Graph, plan: Plan, options: RunOptions, display: Display) -> None:
    """Checks that the requested kernels can be made for the groups of a plan, and tells the user which kernels no
    group can have.

    Raises a `FusionError` if a requested kernel cannot be made.
    """
    if options.fusion == "off" or (options.fusion == "auto" and is_too_short(graph, jax.default_backend())):
        return
    if graph.host is not None:
        display.note(
            "fusion is not supported for environments that Python steps on the host, because kernels are "
            "generated from JAX functions. hint: use an environment written in JAX (docs/environments.md)"
        )
        return
    groups = plan.partition.groups
    if not any(group.holds("environment", "policy") for group in groups):
        display.note(
            f"rollouts are not fused, because {plan.partition.name} has environment and policy in different "
            "groups. hint: use distribution=single-learner-coarse"
        )
    # nodes of a Ray cluster may have other devices than this host
    if options.fusion == "auto" or plan.place == "ray":
        return
    # imported here, because most runs do not need the compiler
    from rollmill.programs.fused_kernels import check_kernels

    for group in groups:
        device = jax.devices("cpu" if group.device == "cpu" else None)[0]
        place = KernelPlace(device, group.replicas, kernel_parts(group))
        check_kernels(graph, options.fusion, options.numerics, place)


def note_replay_size(graph: Graph, plan: Plan, display: Display, *, num_seeds: int) -> None:
    """Shows the total size of the replay memories of all seeds to the user, before compilation.

    Raises a `UsageError` if the replay memories do not fit into memory.
    """
    size = replay_size(graph, num_seeds=num_seeds)
    if size is None:
        return
    replicas = plan.partition.holder("gradients").replicas
    if plan.place != "ray":  # the memory of other hosts is unknown here
        check_replay_size(size, devices=jax.devices(), replicas=replicas)
    check_message_size(size, place=plan.place, replicas=replicas)
    display.note(str(size))
