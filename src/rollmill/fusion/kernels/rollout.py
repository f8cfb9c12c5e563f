"""A whole rollout as one kernel, which steps policy and environment for blocks of environments.

The kernel computes what `dataflow.collect` computes, from the same functions and the same random keys. Environment
state and policy memory stay in registers throughout, except for large arrays, which stay in memory. Each step
writes its row of the trajectory.

Shape letters: `T` steps, `E` environments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from rollmill.core.errors import CannotFuse
from rollmill.core.operations import operation_scope
from rollmill.core.types import Key
from rollmill.dataflow import (
    Collector,
    Graph,
    Step,
    Trajectory,
    UnfusedPolicy,
    Weights,
    init_state,
    start_one,
    step_one,
)
from rollmill.fusion.estimate.pressure import Pressure, estimate_pressure
from rollmill.fusion.ir import Program, count_nodes, evaluate
from rollmill.fusion.kernels.leaves import Fill, Leaf, each_struct, from_raw, input_leaves, output_leaves, to_raw
from rollmill.fusion.kernels.memories import StepResults, apply_writes, in_order_of_writes
from rollmill.fusion.lower.function import (
    LoweredFunction,
    TracedFunction,
    lower_function,
    lower_traced,
    trace_function,
)
from rollmill.fusion.lower.invariants import ValueClasses, labels_of, meet
from rollmill.fusion.lower.large_arrays import is_too_large
from rollmill.fusion.lower.prologue import Prologue, UniformArrays

MAX_LOWERINGS = 8
"""Maximum number of times that a step is lowered to find invariants of the values it carries."""


@dataclass(frozen=True, eq=False, repr=False)
class RolloutStep:
    """Program for one step of policy and environment. It is lowered once for all kernels of a run."""

    lowered: LoweredFunction
    carried_leaves: list[Leaf]
    """Leaves of the collector (the state carried from step to step) before the step, with their positions among
    the inputs."""
    fixed_leaves: list[Leaf]
    """Inputs that do not change during a rollout: the environment's random key."""
    leaves_after: list[Leaf]
    """Leaves of the collector after the step, with their positions among the outputs."""
    step_leaves: list[Leaf]
    """Leaves that the step adds to the trajectory, with their positions among the outputs."""

    shapes: PyTree[jax.ShapeDtypeStruct]
    """Shapes of the values that the step adds to the trajectory, as a pytree."""

    def __repr__(self) -> str:
        return f"RolloutStep({self.lowered})"

    @property
    def program(self) -> Program:
        """The program that computes one step of policy and environment."""
        return self.lowered.program

    @property
    def prologue(self) -> Prologue:
        """The prologue of the program, which computes the program's uniform arrays from the policy's weights."""
        return self.lowered.prologue

    def carries(self, place: int) -> bool:
        """Returns whether the input at position `place` is carried from one step to the next."""
        node = self.program.inputs[place]
        return node.op == "input" and node.attributes[0] == place

    @property
    def may_change(self) -> list[bool]:
        """For each leaf of the collector, whether a step may change it."""
        program = self.program

        def stays(before: Leaf, after: Leaf) -> bool:
            if after.memory is not None:
                return not after.writes
            return [program.inputs[n] for n in before.places] == [program.outputs[n] for n in after.places]

        return [not stays(*pair) for pair in zip(self.carried_leaves, self.leaves_after, strict=True)]


def lower_rollout(graph: Graph) -> RolloutStep:
    """Lowers one step of a graph's policy and environment to a program, without computing anything.

    Raises:
        CannotFuse: an operation is not supported. The message gives its source line.
    """
    if isinstance(graph.policy, UnfusedPolicy):
        raise CannotFuse(graph.policy.reason)
    key, indices = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.eval_shape(partial(init_state, graph), key, indices)
    return rollout_step(graph, jax.eval_shape(graph.weights, state.learner), each_struct(state.collector))


def rollout_step(graph: Graph, weights: PyTree[Any], collector: PyTree[jax.ShapeDtypeStruct]) -> RolloutStep:
    """Lowers one step of policy and environment to a program.

    Args:
        graph: the training graph.
        weights: the policy's weights, or their shapes.
        collector: shapes of the collector of ONE environment.

    Raises:
        CannotFuse: an operation is not supported. The message gives its source line.
    """
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    t = jax.ShapeDtypeStruct((), jnp.int32)
    function, each = partial(_step_raw, graph, collector), (to_raw(collector), key, t)
    traced = trace_function(function, each, (weights,), carried=True)
    lowered = _under_invariants(_label_start(graph, key), traced)
    leaves = input_leaves(lowered, [to_raw(collector), key])
    count = len(jax.tree.leaves(collector))
    after, step = output_leaves(lowered)
    in_order_of_writes(after)
    key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(partial(_step_with_values, graph), weights, collector, key, t)[1]
    return RolloutStep(lowered, leaves[:count], leaves[count:], after, step, shapes)


def _label_start(graph: Graph, key: jax.ShapeDtypeStruct) -> ValueClasses:
    """Labels the numbers of an environment's first state, or returns none if its reset cannot be lowered."""
    # Large arrays, which may stay in memory, get no labels, so they are left out here.
    few = lambda leaf: jnp.zeros(0, leaf.dtype) if is_too_large(leaf.shape) else leaf

    def begin(key: Any, index: Array) -> list[Any]:
        # A memory may begin with numbers of Python.
        start = jax.tree.map(jnp.asarray, start_one(graph, jax.random.wrap_key_data(key), index))
        return [few(leaf) for leaf in to_raw(start)]

    try:
        labels = labels_of(lower_function(begin, (key, jax.ShapeDtypeStruct((), jnp.int32))).outputs)
    except CannotFuse:
        return ()
    return tuple(own or None for own in labels)


def _under_invariants(labels: ValueClasses, step: TracedFunction) -> LoweredFunction:
    """Returns a step's program under the largest invariant part of an assumption, or none if that takes long."""
    # From the strongest assumption to weaker ones, until a step preserves its assumption. By induction, the
    # assumption then holds before the first step and after every step.
    for _ in range(MAX_LOWERINGS):
        lowered = lower_traced(step, labels)
        left = meet(labels, lowered.outputs[0][: len(labels)])
        if left == labels:
            return lowered
        labels = left
    # Always correct, because nothing is assumed and everything is carried.
    return lower_traced(step)


def estimate_rollout_pressure(graph: Graph) -> Pressure:
    """Estimates the register pressure and size of a graph's rollout kernel, without compiling it.

    Raises:
        CannotFuse: policy and environment cannot be fused. The message gives the source line.
    """
    return estimate_step_pressure(lower_rollout(graph))


def estimate_step_pressure(step: RolloutStep) -> Pressure:
    """Estimates the register pressure and size of a step, including the programs that fill large arrays."""
    own = estimate_pressure(step.program)
    fills = [write.program for leaf in step.leaves_after for write in leaf.writes if isinstance(write, Fill)]
    return own._replace(num_operations=own.num_operations + sum(count_nodes(fill.nodes()) for fill in fills))


def _step_raw(graph: Graph, like: PyTree, weights: Weights, raw: list[Array], key: Array, t: Int[Array, ""]):
    """Returns a step function whose arguments and results are leaves without typed keys."""
    after, step = _step_with_values(graph, weights, from_raw(like, raw), jax.random.wrap_key_data(key), t)
    return to_raw(after), to_raw(step)


def _step_with_values(
    graph: Graph, weights: Weights, now: Collector, key: Key, t: Int[Array, ""]
) -> tuple[Collector, Step]:
    """Returns a step with all that is cheaper to compute here than of the whole trajectory."""
    after, step = step_one(graph, weights, now, key, t)
    return after, step if graph.compute_values is None else graph.compute_values(weights, step)


Run = Callable[[RolloutStep, UniformArrays, list[Array], Array, int], tuple[list[Array], list[Array]]]
"""Function that runs a rollout: `(step, uniforms, leaves [E, ...], keys [E, 2], T) -> (leaves after it, trajectory
leaves [T, E, ...])`."""


def fused_collect(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, run: Run, step: RolloutStep | None = None
) -> tuple[Collector, Trajectory]:
    """Computes `dataflow.collect` with a kernel, including what `graph.compute_values` adds to each step.

    `run` calls the kernel. The collector must come from `dataflow.init_state`, because the kernel does not read
    values that are equal in all such collectors. `step` is the graph's lowered program, lowered here by default.
    """
    step = step or rollout_step(graph, weights, each_struct(collector))
    with operation_scope("rollout kernel"):
        after_raw, step_raw = run(step, *rollout_inputs(step, weights, collector, key), graph.loops.num_steps)
    after, steps = from_raw(collector, after_raw), from_raw(step.shapes, step_raw)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def rollout_inputs(
    step: RolloutStep, weights: Weights, collector: Collector, key: Key
) -> tuple[UniformArrays, list[Array], Array]:
    """Computes the arguments of a rollout kernel: uniform arrays, the collector's leaves, and random keys."""
    # Keys depend on the global index, as in `dataflow.collect`, so the random values do not depend on the devices.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, collector.index)
    return step.prologue(weights), to_raw(collector), jax.random.key_data(keys)


# --- the reference --------------------------------------------------------------------------------------


def run_reference(
    step: RolloutStep,
    uniforms: UniformArrays,
    carried: list[Array],
    keys: Array,
    num_steps: int,
    *,
    precision: Any = None,
) -> tuple[list[Array], list[Array]]:
    """Runs a rollout step by step with JAX functions, as the reference for kernels."""
    block = keys.shape[0]

    def body(now: list[Array], t: Int[Array, ""]) -> tuple[list[Array], list[Array]]:
        memories = [
            array.reshape(block, -1)
            for leaf, array in zip(step.carried_leaves, now, strict=True)
            if leaf.memory is not None
        ]
        pairs = zip([*step.carried_leaves, *step.fixed_leaves], [*now, keys], strict=True)
        inputs = [x for leaf, array in pairs for x in leaf.split(array)]
        inputs.append(jnp.broadcast_to(t, (block,)))
        outputs = evaluate(
            step.program, inputs, uniforms.slots, block=block, precision=precision, memories=memories
        )
        own = StepResults(outputs, memories, uniforms.slots)

        def join(leaf: Leaf) -> Array:
            if leaf.memory is not None:
                return apply_writes(leaf, own).reshape(block, *leaf.shape)
            return leaf.join(outputs, uniforms, block)

        return [join(leaf) for leaf in step.leaves_after], [join(leaf) for leaf in step.step_leaves]

    return jax.lax.scan(body, carried, jnp.arange(num_steps))


def written_leaves(step: RolloutStep) -> list[Leaf]:
    """Returns the leaves of the collector, the state carried from step to step, that a rollout changes."""
    return [leaf for leaf, changes in zip(step.leaves_after, step.may_change, strict=True) if changes]


def aliased_outputs(step: RolloutStep) -> dict[int, int]:
    """Maps the carried leaves that a rollout updates in place to the kernel's outputs, by index."""
    numbers = [n for n, changes in enumerate(step.may_change) if changes]
    return {n: output for output, n in enumerate(numbers) if step.carried_leaves[n].memory is not None}


def unpack(
    step: RolloutStep, uniforms: UniformArrays, written: Sequence[Array], carried: Sequence[Array], num_steps: int
) -> tuple[list[Array], list[Array]]:
    """Assembles the collector and the trajectory of a rollout from the kernel's outputs, unchanged leaves and
    leaves that all environments share.
    """
    rest, num_envs = iter(written), carried[0].shape[0]
    pairs = zip(carried, step.may_change, strict=True)
    after = [next(rest) if changes else before for before, changes in pairs]
    whole = lambda leaf: next(rest) if leaf.places else leaf.repeated(uniforms, num_steps, num_envs)
    return after, [whole(leaf) for leaf in step.step_leaves]
