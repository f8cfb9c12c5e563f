"""Describes training states of a graph: their shapes, their sizes, and the states with which runs begin."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from rollmill.core.types import Key
from rollmill.dataflow import (
    Collector,
    Graph,
    Hyperparameters,
    Learner,
    State,
    get_traces,
    start_collector,
    start_learner,
    tree_bytes,
)
from rollmill.lowerings.threefry import small_programs
from rollmill.programs.compiler_options import start_options
from rollmill.record.checkpoints import GivenLeaves, LeftOut
from rollmill.record.leaves import from_host, to_host

LARGE_STATE_BYTES = 32 * 2**20
"""Minimum size in bytes of a training state on a device for which an iteration overwrites its input state instead
of copying it."""

DIVIDED = ("collector", "rings")
"""Names of the parts of the training state that are divided among devices. Each device copies the others."""


def state_shapes(graph: Graph, seeds: Sequence[int] = (0,)) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the training state of a graph, without computing anything."""
    state = get_traces(graph).start.result
    if len(seeds) == 1:
        return state
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(seeds), *leaf.shape), leaf.dtype), state)


def state_bytes(state: PyTree[jax.ShapeDtypeStruct], *, devices: int) -> float:
    """Returns the bytes of a training state on each of `devices` devices, among which environments are divided."""
    whole, divided = tree_bytes(state), sum(tree_bytes(getattr(state, name)) for name in DIVIDED)
    return divided / devices + whole - divided


def reuses_memory(graph: Graph, state: PyTree[jax.ShapeDtypeStruct], *, devices: int) -> bool:
    """Returns whether programs overwrite a training state, because it is large or has a replay memory."""
    return graph.replay is not None or state_bytes(state, devices=devices) >= LARGE_STATE_BYTES


def start_inputs(
    graph: Graph, seeds: Sequence[int], lanes: Sequence[Graph] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the inputs of the program that creates the first state: the seeds, and `Graph.inputs` for each seed.

    The hyperparameters come from `graph`, or from `lanes`, one graph per seed.
    """
    held = [lane.inputs for lane in lanes or [graph] * len(seeds)]
    numbers = {name: np.asarray([each[name] for each in held], np.float32) for name in graph.inputs}
    return np.asarray(seeds, np.uint32), numbers


def hyperparameters_of(graph: Graph) -> dict[str, np.ndarray]:
    """Returns the hyperparameters of a graph as NumPy arrays, which programs take as inputs."""
    return {name: np.asarray(value, np.float32) for name, value in graph.hyperparameters.items()}


def first_state(graph: Graph, seeds: UInt32[Array | np.ndarray, " S"], hyperparameters: Hyperparameters) -> State:
    """Returns the training state before the first iteration, for the inputs that `start_inputs` returns."""
    trace = get_traces(graph).start
    begin = lambda seed, numbers: trace(jax.random.key(seed), numbers)
    # `map` instead of `vmap`, so that each seed begins with exactly the weights of a run with this seed
    if len(seeds) > 1:
        return jax.lax.map(lambda inputs: begin(*inputs), (seeds, hyperparameters))
    return begin(*jax.tree.map(lambda leaf: leaf[0], (seeds, hyperparameters)))


def start_state(graph: Graph, seeds: Sequence[int] = (0,)) -> State:
    """Creates the initial training state on the default device."""
    options = start_options(tree_bytes(state_shapes(graph)))
    with small_programs(jax.default_backend()):
        return jax.jit(partial(first_state, graph), compiler_options=options)(*start_inputs(graph, seeds))


def begin_learner(graph: Graph, key: Key) -> Learner:
    """Creates the learner state before the first iteration, on the default device. `key` is the root key of the
    run.
    """
    start = jax.jit(partial(start_learner, graph), compiler_options=start_options())
    with small_programs(jax.default_backend()):
        return start(key, hyperparameters_of(graph))


def start_environments(graph: Graph, key: Key, index: np.ndarray | Array, iteration: int) -> Collector:
    """Starts the environments with the global indices `index` before an iteration, by one compiled program."""
    parameters = {name: np.float32(value) for name, value in graph.parameters.items()}
    if "steps_done" in parameters:
        parameters["steps_done"] = np.float32(iteration * graph.loops.num_steps)
    start = jax.jit(partial(start_collector, graph), compiler_options=start_options())
    with small_programs(jax.default_backend()):
        return start(key, index, parameters)


def held_leaves(graph: Graph, shape: tuple[int, ...] = ()) -> GivenLeaves:
    """Returns the leaves of a restored training state that come from `graph` instead of the checkpoint.

    The learner takes its hyperparameters from the graph. If the checkpoint has no count of updates, because the
    run had no schedule, the count follows from the iteration. If the checkpoint has no scale of an adapted
    learning rate, the scale is 1.

    Args:
        graph: graph to train.
        shape: shape of the state's key, `(S,)` for several seeds.
    """
    held, loops = hyperparameters_of(graph), graph.loops

    def progress(iteration: int) -> dict[str, np.ndarray]:
        whole = np.full(shape, iteration * loops.epochs * loops.num_minibatches, np.int32)
        adapted = {"learner.rate_scale": np.ones(shape, np.float32)}
        return {"learner.progress.whole": whole, "learner.progress.part": np.zeros(shape, np.float32), **adapted}

    numbers = {f"learner.hyperparameters.{name}": np.full(shape, value) for name, value in held.items()}
    numbers |= _parameter_leaves(graph, shape)
    return GivenLeaves(numbers, progress, LeftOut("collector.", partial(_begin_environments, graph)))


def _parameter_leaves(graph: Graph, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns the parameters that each copy of an environment holds, as leaves of the training state, by path."""
    copies = (*shape, graph.loops.num_envs)
    names = graph.parameters.keys() - {"steps_done"}  # the state itself counts its steps
    return {f"collector.environment.2.{n}": np.full(copies, graph.parameters[n], np.float32) for n in names}


def _begin_environments(graph: Graph, iteration: int, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns environments that begin before an iteration, by path, for a state with these other leaves.

    Stored episodes of these environments end, because they do not continue. Python objects begin with their
    workers: their part of the state is empty.
    """
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    if graph.host is not None:
        shapes = state_shapes(graph).collector
        return to_host({"collector": jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)})
    from rollmill.dataflow.lost_environments import end_running_episodes  # needed by few resumed runs

    end = jax.jit(partial(end_running_episodes, graph), donate_argnums=0)

    def begin(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(leaves["key"])), iteration)
        begun = {"collector": start_environments(graph, key, index, iteration)}
        if graph.replay is not None:
            rings = from_host(leaves, {"rings": state_shapes(graph).rings})["rings"]
            begun["rings"] = end(rings)
        return to_host(begun)

    if leaves["key"].ndim == 1:
        return begin(leaves)
    own = {name: leaf for name, leaf in leaves.items() if name == "key" or name.startswith("rings.")}
    seeds = [begin({name: leaf[seed] for name, leaf in own.items()}) for seed in range(len(leaves["key"]))]
    return {name: np.stack([seed[name] for seed in seeds]) for name in seeds[0]}
