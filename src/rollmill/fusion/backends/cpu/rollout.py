"""Rollouts as machine code: a core steps policy and environment for one block of environments at a time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rollmill.core.errors import CannotFuse
from rollmill.fusion.backends.cpu.builder import INT32, Emitter, Value, memory_type
from rollmill.fusion.backends.cpu.codegen import CodeWriter, MemoryCells
from rollmill.fusion.backends.cpu.control import BlockValue, assign, assign_all, new_variable, read
from rollmill.fusion.backends.cpu.ffi import NativeKernel, new_program
from rollmill.fusion.backends.cpu.leaf_io import load_leaf, store_leaf
from rollmill.fusion.backends.cpu.memories import write_stores
from rollmill.fusion.backends.cpu.memory import ALIGNMENT, Scratch
from rollmill.fusion.backends.cpu.target import processor
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.memories import in_order_of_writes
from rollmill.fusion.kernels.rollout import RolloutStep, aliased_outputs, written_leaves
from rollmill.fusion.opt.schedule import schedule_of


def rollout_code(
    step: RolloutStep, inputs: Sequence[Any], num_envs: int, num_steps: int, block: int
) -> NativeKernel:
    """Returns the machine code of a rollout.

    Its inputs are the leaves of the collector (the state carried from step to step), random keys and uniform
    arrays. Its outputs are the collector's changed leaves and the leaves of the trajectory. Raises `CannotFuse` if
    there are fewer environments than a block holds.
    """
    own = processor()
    written, of_steps = written_leaves(step), [leaf for leaf in step.step_leaves if leaf.places]
    stored = in_order_of_writes(step.leaves_after)
    if stored:
        # A step overwrites what it reads, so no environment may belong to two blocks.
        block = min(block, num_envs & -num_envs)
    if num_envs < block:
        raise CannotFuse(f"a block of {block} does not fit {num_envs} environments.")
    count = len(inputs) + len(written) + len(of_steps)
    # A block smaller than the processor's vectors becomes one shorter vector.
    emit, pointers, number, base = new_program(min(own.lanes, block), count)
    slots = pointers[len(step.carried_leaves) + len(step.fixed_leaves) : len(inputs)]
    scratch = Scratch(emit, base)
    writer = CodeWriter(emit, scratch, slots, block=block, room=own.accumulators)
    first = _first_of(emit, number, num_envs, block)
    aliases = aliased_outputs(step)
    writer.cells = [
        _cells(emit, leaf, pointers[len(inputs) + aliases[n] if n in aliases else n], first)
        for n, leaf in enumerate(step.carried_leaves)
        if leaf.memory is not None
    ]
    load = lambda leaf, pointer: load_leaf(writer, leaf, pointer, first)
    begin = [held for pair in zip(step.carried_leaves, pointers, strict=False) for held in load(*pair)]
    fixed = [
        held
        for pair in zip(step.fixed_leaves, pointers[len(step.carried_leaves) :], strict=False)
        for held in load(*pair)
    ]
    nodes = step.program.inputs[: len(begin)]
    variables = {n: new_variable(writer, node) for n, node in enumerate(nodes) if step.carries(n)}
    for place, variable in variables.items():
        assign(writer, variable, begin[place])
    now = lambda: _standing(writer, nodes, {place: read(writer, own) for place, own in variables.items()})
    schedule = schedule_of(step.program)
    with emit.loop(num_steps) as t:
        turn = emit.broadcast(emit.builder.trunc(t, INT32))
        outputs_of_step = writer.write(schedule, [*now(), *fixed, [turn] * writer.groups])
        row = emit.builder.add(emit.builder.mul(t, emit.integer(num_envs)), first)
        for leaf, pointer in zip(of_steps, pointers[len(inputs) + len(written) :], strict=True):
            store_leaf(writer, leaf, outputs_of_step, pointer, row)
        after = [outputs_of_step[place] for leaf in step.leaves_after for place in leaf.places]
        write_stores(writer, stored, step.program.outputs, outputs_of_step)
        assign_all(writer, list(variables.values()), [after[place] for place in variables])
    places = [place for leaf in step.leaves_after for place in leaf.places]
    # Final values of the carried state. Leaves that no step changes are not written.
    ends = dict(zip(places, now(), strict=True))
    for leaf, pointer in zip(written, pointers[len(inputs) :], strict=False):
        if leaf.memory is not None:
            continue  # already in place
        store_leaf(writer, leaf, ends, pointer, first)
    emit.builder.ret_void()
    struct = lambda leaf, *axes: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype)
    outputs = [struct(leaf, num_envs) for leaf in written] + [
        struct(leaf, num_steps, num_envs) for leaf in of_steps
    ]
    scratch_size = max(scratch.size, ALIGNMENT)
    return NativeKernel(emit.module, -(-num_envs // block), scratch_size, tuple(outputs), aliases=aliases)


def _cells(emit: Emitter, leaf: Leaf, pointer: Value, first: Value) -> MemoryCells:
    """Returns a large array of the state, for the block that begins with an environment."""
    size = math.prod(leaf.shape)
    begin = emit.builder.mul(first, emit.integer(size))
    return MemoryCells(emit.at(pointer, begin, memory_type(leaf.dtype)), size, leaf.dtype)


def _standing(writer: CodeWriter, nodes: Sequence[Node], held: Mapping[int, BlockValue]) -> list[BlockValue]:
    """Returns the values of a step's inputs, some of which are constants or duplicates of other inputs."""
    known = lambda node: [writer.emit.constant(node.value, node.dtype)] * writer.groups
    return [known(node) if node.op == "constant" else held[node.attributes[0]] for node in nodes]


def _first_of(emit: Emitter, number: Value, num_envs: int, block: int) -> Value:
    """Returns the first environment of a block.

    If blocks do not divide the environments, the last block overlaps the one before, with the same results.
    """
    first, last = emit.builder.mul(number, emit.integer(block)), emit.integer(num_envs - block)
    return emit.builder.select(emit.builder.icmp_unsigned(">", first, last), last, first)
