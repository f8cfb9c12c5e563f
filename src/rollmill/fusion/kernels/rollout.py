"""A whole rollout as one kernel: policy and environment, step after step, for a block of environments each.

It computes what `dataflow.collect` computes, from the same functions and the same random keys. The state of the
environments and the policy's memory stay in registers throughout, but for large arrays, which stay in memory. Each
step writes its row of the trajectory.

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
from rollmill.core.operations import traced
from rollmill.core.types import Key
from rollmill.dataflow import (
    Collector,
    Graph,
    Step,
    Trajectory,
    UnfusedPolicy,
    Weights,
    start,
    start_one,
    step_one,
)
from rollmill.fusion.estimate.pressure import Pressure, pressure_of
from rollmill.fusion.ir import Program, evaluate, total_of
from rollmill.fusion.kernels.leaves import Fill, Leaf, each_struct, from_raw, input_leaves, output_leaves, to_raw
from rollmill.fusion.kernels.memories import StepResults, in_order_of_writes, written
from rollmill.fusion.lower.function import (
    LoweredFunction,
    TracedFunction,
    lower_function,
    lower_traced,
    trace_function,
)
from rollmill.fusion.lower.invariants import ValueClasses, labels_of, meet
from rollmill.fusion.lower.large import is_too_large
from rollmill.fusion.lower.prologue import Prologue, UniformArrays

MAX_LOWERINGS = 8
"""Times that a step is lowered, at most, to find what is always true of what it carries."""


@dataclass(frozen=True, eq=False, repr=False)
class RolloutStep:
    """One step of policy and environment as a program: lowered once, for any number of kernels."""

    lowered: LoweredFunction
    carried: list[Leaf]
    """The collector's leaves, with their places among the inputs."""
    fixed: list[Leaf]
    """Inputs that stay as they are: the environment's key of this rollout."""
    after: list[Leaf]
    """The collector's leaves, with their places among the outputs."""
    step: list[Leaf]
    """The leaves of the trajectory's step, with their places among the outputs."""

    shapes: PyTree[jax.ShapeDtypeStruct]
    """Shapes of the trajectory's step, in its structure."""

    def __repr__(self) -> str:
        return f"RolloutStep({self.lowered})"

    @property
    def program(self) -> Program:
        """The program of one step."""
        return self.lowered.program

    @property
    def prologue(self) -> Prologue:
        """From the policy's weights to the arrays that the program reads."""
        return self.lowered.prologue

    def carries(self, place: int) -> bool:
        """Whether this number or row is carried from step to step, rather than constant or a repetition."""
        node = self.program.inputs[place]
        return node.op == "input" and node.attributes[0] == place

    @property
    def changed(self) -> list[bool]:
        """Whether a step may change each of the collector's leaves."""
        program = self.program

        def stays(before: Leaf, after: Leaf) -> bool:
            if after.memory is not None:
                return not after.writes
            return [program.inputs[n] for n in before.places] == [program.outputs[n] for n in after.places]

        return [not stays(*pair) for pair in zip(self.carried, self.after, strict=True)]


def lower_rollout(graph: Graph) -> RolloutStep:
    """Lowers the program of one step for the shapes of a graph's first state, without computing.

    Raises:
        CannotFuse: the program contains an unsupported operation. The message gives its line.
    """
    if isinstance(graph.policy, UnfusedPolicy):
        raise CannotFuse(graph.policy.reason)
    key, indices = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.eval_shape(partial(start, graph), key, indices)
    return rollout_step(graph, jax.eval_shape(graph.weights, state.learner), each_struct(state.collector))


def rollout_step(graph: Graph, weights: PyTree[Any], collector: PyTree[jax.ShapeDtypeStruct]) -> RolloutStep:
    """Returns the program of one step.

    Args:
        graph: the graph to lower.
        weights: shapes of the policy's weights, or arrays of these shapes.
        collector: shapes of ONE environment's.

    Raises:
        CannotFuse: the program contains an unsupported operation. The message gives its line.
    """
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    t = jax.ShapeDtypeStruct((), jnp.int32)
    function, each = partial(_step_raw, graph, collector), (to_raw(collector), key, t)
    traced = trace_function(function, each, (weights,), carried=True)
    lowered = _under_invariants(_begun(graph, key), traced)
    leaves = input_leaves(lowered, [to_raw(collector), key])
    count = len(jax.tree.leaves(collector))
    after, step = output_leaves(lowered)
    in_order_of_writes(after)
    key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(partial(_appraised_step, graph), weights, collector, key, t)[1]
    return RolloutStep(lowered, leaves[:count], leaves[count:], after, step, shapes)


def _begun(graph: Graph, key: jax.ShapeDtypeStruct) -> ValueClasses:
    """Labels the numbers of an environment's first state, or returns none if its reset cannot be lowered."""
    # Nothing is said of large arrays, which may lie in memory, so that they need not be lowered here.
    few = lambda leaf: jnp.zeros(0, leaf.dtype) if is_too_large(leaf.shape) else leaf
    begin = lambda key, index: [few(x) for x in to_raw(start_one(graph, jax.random.wrap_key_data(key), index))]
    try:
        labels = labels_of(lower_function(begin, (key, jax.ShapeDtypeStruct((), jnp.int32))).outputs)
    except CannotFuse:
        return ()
    return tuple(own or None for own in labels)


def _under_invariants(labels: ValueClasses, step: TracedFunction) -> LoweredFunction:
    """Returns a step's program under the largest invariant part of an assumption, or under none if that takes
    long.
    """
    # From the strongest assumption downwards, until a step keeps what was assumed of it. It holds then before the
    # first step, and behind each, by induction.
    for _ in range(MAX_LOWERINGS):
        lowered = lower_traced(step, labels)
        left = meet(labels, lowered.outputs[0][: len(labels)])
        if left == labels:
            return lowered
        labels = left
    # Always sound: nothing is assumed, and everything carried.
    return lower_traced(step)


def pressure_of_rollout(graph: Graph) -> Pressure:
    """Returns the size of a step of policy and environment without compiling, if they can be one kernel.

    Raises:
        CannotFuse: if they cannot, with the source line.
    """
    return pressure_of_step(lower_rollout(graph))


def pressure_of_step(step: RolloutStep) -> Pressure:
    """Returns the size of a step, with the programs that write whole arrays to memory."""
    own = pressure_of(step.program)
    fills = [write.program for leaf in step.after for write in leaf.writes if isinstance(write, Fill)]
    return own._replace(operations=own.operations + sum(total_of(fill.nodes()) for fill in fills))


def _step_raw(graph: Graph, like: PyTree, weights: Weights, raw: list[Array], key: Array, t: Int[Array, ""]):
    """A step from leaves without typed keys to such leaves."""
    after, step = _appraised_step(graph, weights, from_raw(like, raw), jax.random.wrap_key_data(key), t)
    return to_raw(after), to_raw(step)


def _appraised_step(
    graph: Graph, weights: Weights, now: Collector, key: Key, t: Int[Array, ""]
) -> tuple[Collector, Step]:
    """Returns a step with all that is cheaper to compute here than of the whole trajectory."""
    after, step = step_one(graph, weights, now, key, t)
    return after, step if graph.appraise is None else graph.appraise(weights, step)


Run = Callable[[RolloutStep, UniformArrays, list[Array], Array, int], tuple[list[Array], list[Array]]]
"""`(step, uniforms, leaves [E, ...], keys [E, 2], T) -> leaves after, and of the trajectory [T, E, ...]`."""


def fused_collect(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, run: Run, step: RolloutStep | None = None
) -> tuple[Collector, Trajectory]:
    """Computes `dataflow.collect` by `run`, and adds what `graph.appraise` computes.

    The collector must come from `dataflow.start`, because the kernel does not read values that all such collectors
    share. `step` is the lowered step of the graph. By default, it is lowered here.
    """
    step = step or rollout_step(graph, weights, each_struct(collector))
    with traced("rollout kernel"):
        after_raw, step_raw = run(step, *rollout_inputs(step, weights, collector, key), graph.loops.num_steps)
    after, steps = from_raw(collector, after_raw), from_raw(step.shapes, step_raw)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def rollout_inputs(
    step: RolloutStep, weights: Weights, collector: Collector, key: Key
) -> tuple[UniformArrays, list[Array], Array]:
    """Computes the arguments of a kernel other than its program and the number of steps."""
    # By global index, as `dataflow.collect` does: the same numbers on any number of devices.
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
    """Runs step after step by JAX functions."""
    block = keys.shape[0]

    def body(now: list[Array], t: Int[Array, ""]) -> tuple[list[Array], list[Array]]:
        memories = [
            array.reshape(block, -1)
            for leaf, array in zip(step.carried, now, strict=True)
            if leaf.memory is not None
        ]
        pairs = zip([*step.carried, *step.fixed], [*now, keys], strict=True)
        inputs = [x for leaf, array in pairs for x in leaf.split(array)]
        inputs.append(jnp.broadcast_to(t, (block,)))
        outputs = evaluate(
            step.program, inputs, uniforms.slots, block=block, precision=precision, memories=memories
        )
        own = StepResults(outputs, memories, uniforms.slots)

        def join(leaf: Leaf) -> Array:
            if leaf.memory is not None:
                return written(leaf, own).reshape(block, *leaf.shape)
            return leaf.join(outputs, uniforms, block)

        return [join(leaf) for leaf in step.after], [join(leaf) for leaf in step.step]

    return jax.lax.scan(body, carried, jnp.arange(num_steps))


def written_leaves(step: RolloutStep) -> list[Leaf]:
    """Returns the collector's leaves that a rollout changes."""
    return [leaf for leaf, changes in zip(step.after, step.changed, strict=True) if changes]


def aliased(step: RolloutStep) -> dict[int, int]:
    """Returns the numbers of the collector's leaves that a rollout changes in place, with those of its outputs."""
    numbers = [n for n, changes in enumerate(step.changed) if changes]
    return {n: output for output, n in enumerate(numbers) if step.carried[n].memory is not None}


def unpack(
    step: RolloutStep, uniforms: UniformArrays, written: Sequence[Array], carried: Sequence[Array], num_steps: int
) -> tuple[list[Array], list[Array]]:
    """All results of a rollout: a kernel's outputs, unchanged leaves, and leaves that all environments share."""
    rest, num_envs = iter(written), carried[0].shape[0]
    pairs = zip(carried, step.changed, strict=True)
    after = [next(rest) if changes else before for before, changes in pairs]
    whole = lambda leaf: next(rest) if leaf.places else leaf.repeated(uniforms, num_steps, num_envs)
    return after, [whole(leaf) for leaf in step.step]
