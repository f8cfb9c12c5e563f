"""Compiles a whole training iteration into one program, for one device or a mesh of devices.

On a mesh, every device holds an equal share of the environments and a copy of the learner, and means are reduced
between devices. Nothing inside an iteration waits for the host. Metrics leave the program as one small vector.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.machine import Numerics, keep_freed_memory
from rollmill.dataflow import (
    Graph,
    Loops,
    PackedMetrics,
    Reduce,
    State,
    get_traces,
    identity,
    iterate,
    metric_names,
    num_shards_for,
    pack_metrics,
    start_digest,
    tree_bytes,
)
from rollmill.planning.plan import AllReduce
from rollmill.programs.compiler_options import CompilerOptions, options_for, start_options, without_tuning
from rollmill.programs.empty_arrays import NO_EMPTY_ARRAYS, EmptyArrays
from rollmill.programs.iteration_programs import MAKERS, MadeBeside, StepMaker, may_be_stored, seconds_of_call
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import Fusion, KernelChoice, Launches, seeds_side_by_side
from rollmill.programs.meshes import AXES, mesh_of
from rollmill.programs.program_store import NO_STORE, ProgramStore, StorableProgram, store_for
from rollmill.programs.reductions import MeshAllReduce, mesh_all_reduce
from rollmill.programs.repeated import iterate_up_to, iterations_per_call, sum_iterations
from rollmill.programs.states import DIVIDED, first_state, reuses_memory, start_inputs, state_shapes

IN_PLACE = ("gpu",)
"""Platforms on which every iteration overwrites its input state, even a small one.

The addresses of a state then stay the same, and the host need not write them into the CUDA graphs of each
iteration. A small state is copied before each window of iterations, for a search for faults in the window."""


UNROLL = {"gpu": 4}
"""Number of environment steps that are unrolled in the compiled loop, by platform.

On a GPU, launching the kernels of a small step takes longer than computing them. `benchmarks/training.py --unroll`
measures this.
"""


def unroll_for(platform: str) -> int:
    """Returns how many environment steps are unrolled in the compiled loop by default on a platform."""
    return UNROLL.get(platform, 1)


class CompiledProgram(NamedTuple):
    """A training run compiled into one program for its devices. Calling its functions compiles nothing more."""

    start: Callable[[], State]
    """Returns the training state before the first iteration."""
    step: jax.stages.Compiled
    """The compiled iteration, `State -> (State, PackedMetrics)`.

    With several seeds, metrics have an additional first axis. If the program runs several iterations per call, the
    signature is `(State, count) -> (State, PackedMetrics)`: it runs `count` iterations, and returns the metrics of
    each, or with a replay memory their sums (the minimum of flags).
    """
    metric_names: tuple[str, ...]
    compile_seconds: float
    shardings: PyTree[NamedSharding]
    """Sharding of each leaf of the training state over the devices."""
    state: PyTree[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the state. A tuple with the state of each seed, if seeds take turns."""
    notes: Sequence[str] = ()
    """Notices for the user about how the program computes."""
    launches: Launches | None = None
    """Launch configurations of the program's kernels, or None if none were chosen."""
    not_stored: str | None = None
    """Reason why the program could not be stored, so that the next start has to lower it again, or None."""
    donates_state: bool = False
    """True if `step` overwrites the memory of its input state, which cannot be used afterwards."""
    copies_state: bool = False
    """True if the state is copied before a window of iterations that would overwrite it. Only small states without
    a replay memory are copied.
    """
    sums_iterations: bool = False
    """True if `step` takes a number of iterations and sums their metrics, as programs with a replay memory do."""
    iterations_per_call: int = 1
    """Maximum number of iterations that a call of `step` runs, if it does not sum their metrics."""
    operands: tuple[Array, ...] = ()
    """Additional arrays that are passed to `step` as its last arguments."""
    reduction: AllReduce | None = None
    """Name of the all-reduce between the program's devices, or None if it was not chosen by timing."""
    empty: EmptyArrays = NO_EMPTY_ARRAYS
    """Leaves of the state without elements, which `step` neither takes nor returns."""

    @property
    def devices(self) -> Sequence[Any]:
        """The devices that the program runs on."""
        return list(jax.tree.leaves(self.shardings)[0].mesh.devices.flat)

    @property
    def loses_state(self) -> bool:
        """True if the state before a window of iterations no longer exists after the window."""
        return self.donates_state and not self.copies_state

    def to_be_overwritten(self, state: State) -> State:
        """Returns a state that iterations may overwrite: `state` itself, or a copy if the
        program `copies_state`.
        """
        return _copy(state) if self.copies_state else state

    def advance(self, state: State, count: int = 1) -> tuple[State, Array]:
        """Runs `count` iterations. Returns the last state and the metrics, which `metrics_of_each` divides.

        If the program `donates_state`, the given state cannot be used afterwards. `count` must be at most
        `iterations_per_call`, unless the program `sums_iterations`.
        """
        if isinstance(state, tuple):  # seeds take turns
            states, metrics = zip(*(self.advance(own, count) for own in state), strict=True)
            together: Any = states
            return together, _stack(metrics)
        counts = (np.int32(count),) if self.sums_iterations or self.iterations_per_call > 1 else ()
        state, metrics = self.step(self.empty.removed_from(state), *counts, *self.operands)
        return self.empty.added_to(state), metrics.values

    def metrics_of_each(self, metrics: np.ndarray, count: int) -> np.ndarray:
        """Returns the metrics of each of `count` iterations along the first axis, or their sums alone."""
        return metrics[:count] if self.iterations_per_call > 1 else metrics[None]

    def place(self, state: PyTree[Array]) -> State:
        """Transfers a restored training state from the host to the program's devices."""
        return jax.tree.map(jax.device_put, state, self.shardings)


def lower(
    graph: Graph,
    *,
    seeds: Sequence[int] = (0,),
    lanes: Sequence[Graph] | None = None,
    in_turns: bool = False,
    devices: Sequence[Any] | None = None,
    instances: int = 1,
    mean: MeshAllReduce | None = None,
    unroll: int | None = None,
    fusion: Fusion = "off",
    numerics: Numerics = "tf32",
    launches: Launches | None = None,
    announce: Callable[[KernelChoice], None] = lambda kernels: None,
    compiler_options: CompilerOptions | None = None,
) -> CompiledProgram:
    """Compiles the training of a graph into one program.

    Args:
        graph: the algorithm and environment to train.
        seeds: seeds of the runs in the program, which trains one run per seed side by side.
        lanes: one graph per seed, which provides the hyperparameters of this seed. The graphs must be equal
            otherwise. Default: all seeds have the hyperparameters of `graph`.
        in_turns: if seeds would not be computed at once (see `seeds_side_by_side`), call the program of a single
            seed once per seed, so that any number of seeds uses the same program. The state is then a tuple with
            the state of each seed.
        devices: the devices of the mesh, in the order of `mesh_of`. Default: the first device of the default
            platform.
        instances: number of devices of the mesh that share a GPU.
        mean: the mean over the mesh. Default: a flat all-reduce.
        unroll: number of unrolled steps of the environment loop. Default: chosen by platform.
        fusion: which parts are computed by kernels. See `choose_kernels`.
        numerics: precision of matrix products in kernels.
        launches: launch configurations of kernels that were chosen when the run began.
        announce: called with the chosen kernels before the other processes of a mesh compile.
        compiler_options: XLA options in addition to those of every program.

    Raises:
        UsageError: the number of devices does not divide the number of shards, or the requested fusion is not
            possible.
    """
    mesh = mesh_of(devices if devices is not None else jax.devices()[:1], instances=instances)
    check_devices(graph.loops, mesh.size)
    began, platform = time.perf_counter(), mesh.devices.flat[0].platform
    if platform == "cpu":
        keep_freed_memory()
    takes_turns = in_turns and mesh.size == 1 and not seeds_side_by_side(graph, platform)
    at_once = seeds[:1] if takes_turns else seeds
    request = KernelRequest(
        graph,
        fusion=fusion,
        numerics=numerics,
        unroll=unroll or unroll_for(platform),
        devices=sorted(mesh.devices.flat, key=lambda device: device.process_index != jax.process_index()),
        num_seeds=len(seeds),
        launches=launches,
        turns=len(seeds) // len(at_once),
    )
    state, mean = _place_state(graph, at_once, mesh), mean or mesh_all_reduce(mesh)
    loses_state = reuses_memory(graph, state.shapes, devices=mesh.size)
    donates_state = loses_state or platform in IN_PLACE
    draws_for_seeds = graph.replay is not None and len(at_once) > 1
    options = {**options_for(mesh, draws_for_seeds=draws_for_seeds), **(compiler_options or {})}
    step_with = partial(_step_program, graph, at_once, mean, state, options, donates_state)
    start = _start_program(graph, at_once, state)
    with MadeBeside(start, _start_store(graph, at_once, mesh)) as begun:
        begin = lambda: begun.wait()(*start_inputs(graph, at_once, lanes))

        def seconds_of(kernels: KernelChoice, step: jax.stages.Compiled) -> float:
            most = iterations_per_call(graph, len(at_once), list(mesh.devices.flat), kernels)
            arguments = (*((np.int32(most),) if most > 1 else ()), *mean.operands)
            return seconds_of_call(begin, lambda state: step(state, *arguments)[0]) / most

        stores: list[ProgramStore] = []
        begin_one = begin if mesh.size == len(at_once) == 1 else None
        maker = StepMaker(request, step_with, mesh, begun.wait, announce, seconds_of, stores, begin_one)
        kernels, compiled_step = maker.make()
        compiled_start = begun.wait()
    start_with = lambda *inputs: state.empty.added_to(compiled_start(*inputs))
    program = CompiledProgram(
        start=partial(start_with, *start_inputs(graph, at_once, lanes)),
        step=compiled_step,
        metric_names=_names_of(compiled_step),
        compile_seconds=time.perf_counter() - began,
        shardings=state.shardings,
        state=state.shapes,
        notes=kernels.notes,
        launches=kernels.launches,
        donates_state=donates_state,
        copies_state=donates_state and not loses_state,
        not_stored=stores[-1].refusal if stores else None,
        sums_iterations=graph.replay is not None,
        iterations_per_call=iterations_per_call(graph, len(at_once), list(mesh.devices.flat), kernels),
        operands=mean.operands,
        empty=state.empty,
    )
    if not takes_turns:
        return program
    inputs = [start_inputs(graph, [seed], lanes and [lanes[number]]) for number, seed in enumerate(seeds)]
    return _taking_turns(program, [partial(start_with, *each) for each in inputs])


def _taking_turns(program: CompiledProgram, begins: Sequence[Callable[[], State]]) -> CompiledProgram:
    """Returns a program of a single seed as a program whose state is a tuple with the state of each seed."""
    return program._replace(
        start=lambda: tuple(begin() for begin in begins),
        shardings=(program.shardings,) * len(begins),
        state=(program.state,) * len(begins),
    )


class _PlacedState(NamedTuple):
    """Shapes of the training state, and the division of its leaves among the devices of a mesh."""

    mesh: Mesh
    shapes: PyTree[jax.ShapeDtypeStruct]
    specs: PyTree[PartitionSpec]
    shardings: PyTree[NamedSharding]
    empty: EmptyArrays
    """Leaves without elements, which programs neither take nor return."""

    @property
    def placed(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes with their shardings."""
        place = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        return jax.tree.map(place, self.shapes, self.shardings)


def _place_state(graph: Graph, seeds: Sequence[int], mesh: Mesh) -> _PlacedState:
    shapes = state_shapes(graph, seeds)
    specs = _specs(shapes, has_seeds=len(seeds) > 1)
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return _PlacedState(mesh, shapes, specs, shardings, EmptyArrays.of(shapes, shardings))


def _step_program(
    graph: Graph,
    seeds: Sequence[int],
    mean: MeshAllReduce,
    state: _PlacedState,
    options: CompilerOptions,
    donates_state: bool,
    kernels: KernelChoice,
) -> StorableProgram:
    """Returns the program of an iteration with these kernels."""
    if kernels.rollouts.fused and kernels.gradients.fused:
        options = without_tuning(options, state.mesh.devices.flat[0].platform)
    repeats = _repeat(graph, seeds, state.mesh, kernels) is not None
    counts = [jax.ShapeDtypeStruct((), jnp.int32)] if repeats else []
    return StorableProgram(
        part="step",
        function=_step(graph, seeds, mean, state, kernels),
        arguments=(state.empty.removed_from(state.placed), *counts, *mean.operands),
        result=lambda: (state.shapes, PackedMetrics(np.zeros(1), metric_names(graph))),
        options=options,
        settings={"donate_argnums": 0} if donates_state else {},
    )


def _names_of(step: jax.stages.Compiled) -> tuple[str, ...]:
    """Returns the names of the metrics of a compiled step."""
    returned = step.out_tree
    return jax.tree.unflatten(returned, range(returned.num_leaves))[1].names


def _start_program(graph: Graph, seeds: Sequence[int], state: _PlacedState) -> StorableProgram:
    """Returns the program that starts a run. Seeds and hyperparameters are inputs of the program."""
    return StorableProgram(
        part="start",
        function=lambda *inputs: state.empty.removed_from(first_state(graph, *inputs)),
        arguments=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start_inputs(graph, seeds)),
        result=lambda: state.shapes,
        options=start_options(tree_bytes(state_shapes(graph))),
        settings={"out_shardings": state.empty.removed_from(state.shardings)},
        runs_once=True,
    )


def _start_store(graph: Graph, seeds: Sequence[int], mesh: Mesh) -> ProgramStore:
    if not may_be_stored(mesh):
        return NO_STORE
    return store_for(mesh.devices.flat[0], start_digest(graph), [len(seeds)], MAKERS)


@jax.jit
def _stack(metrics: Sequence[Array]) -> Array:
    return jnp.stack(metrics, axis=-2)


@jax.jit
def _copy(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


def check_devices(loops: Loops, num_devices: int) -> None:
    """Checks that every device can hold the same number of whole shards of environments. Raises a `UsageError`
    otherwise.
    """
    if loops.num_shards % num_devices:
        fewer = max(n for n in range(1, num_devices + 1) if loops.num_shards % n == 0)
        shards = num_shards_for(loops, num_devices)
        other = f"num_shards={shards}" if shards else f"a num_envs that is a multiple of {num_devices}"
        raise UsageError(
            f"{num_devices} devices cannot hold equal shares of num_shards={loops.num_shards} "
            f"(num_envs={loops.num_envs}, num_minibatches={loops.num_minibatches}). hint: use {fewer} devices, "
            f"or {other}."
        )


def _over_seeds(
    function: Callable[[State], Any], graph: Graph, seeds: Sequence[int], platform: str
) -> Callable[[State], Any]:
    if len(seeds) == 1:
        return function
    return jax.vmap(function) if seeds_side_by_side(graph, platform) else partial(jax.lax.map, function)


def _specs(state: State, *, has_seeds: bool) -> PyTree[PartitionSpec]:
    """Returns partition specs, which divide collector and replay memory by environments and replicate the rest."""
    by_environment = PartitionSpec(None, AXES) if has_seeds else PartitionSpec(AXES)

    def spec(path, _):
        return by_environment if path[0].name in DIVIDED else PartitionSpec()

    return jax.tree.map_with_path(spec, state)


def _step(
    graph: Graph, seeds: Sequence[int], mean: MeshAllReduce, placed: _PlacedState, kernels: KernelChoice
) -> Callable[..., tuple[State, PackedMetrics]]:
    """Runs one or more iterations on each device of the mesh."""
    mesh, empty = placed.mesh, placed.empty
    repeat = _repeat(graph, seeds, mesh, kernels)
    counts = () if repeat is None else (PartitionSpec(),)

    def step(state: State, *arguments: Array) -> tuple[State, PackedMetrics]:
        count, operands = arguments[: len(counts)], arguments[len(counts) :]
        iterate_once = partial(_iterate_packed, graph, mean.reduce(*operands), kernels)
        once = _over_seeds(iterate_once, graph, seeds, mesh.devices.flat[0].platform)
        state = empty.added_to_part(state)
        after, metrics = once(state) if repeat is None else repeat(once, state, *count)
        return empty.removed_from(after), metrics

    if mesh.size == 1:
        return step
    specs = empty.removed_from(placed.specs)
    rows = [PartitionSpec(AXES)] * len(mean.operands)
    return jax.shard_map(
        step, mesh=mesh, in_specs=(specs, *counts, *rows), out_specs=(specs, PartitionSpec()), check_vma=False
    )


def _repeat(
    graph: Graph, seeds: Sequence[int], mesh: Mesh, kernels: KernelChoice
) -> Callable[..., tuple[State, PackedMetrics]] | None:
    """Returns the function that runs several iterations in one call, or None if a call runs a single one."""
    if graph.replay is not None:
        return sum_iterations
    most = iterations_per_call(graph, len(seeds), list(mesh.devices.flat), kernels)
    return partial(iterate_up_to, most) if most > 1 else None


def _iterate_packed(
    graph: Graph, reduce: Reduce, kernels: KernelChoice, state: State
) -> tuple[State, PackedMetrics]:
    if reduce is identity and kernels.are_plain:
        state, metrics = get_traces(graph).iterate(state)
        return state, pack_metrics(metrics)
    collect_with, make_minibatch_loop = kernels.rollouts.function, kernels.gradients.function
    state, metrics = iterate(
        graph, state, reduce=reduce, collect_with=collect_with, make_minibatch_loop=make_minibatch_loop
    )
    return state, pack_metrics(metrics)
