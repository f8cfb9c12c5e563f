"""Runs programs as machine code, as `evaluate` runs them by JAX's own functions."""

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.backends.cpu.ffi import NativeKernel, call, new_program
from rollmill.fusion.backends.cpu.leaf_io import load_leaf, store_leaf
from rollmill.fusion.backends.cpu.memory import ALIGNMENT, Scratch
from rollmill.fusion.backends.cpu.target import processor
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.opt.schedule import schedule_of

MOST_SAMPLES = 64
"""Samples of a block; what is done with them is written out, vector by vector."""


def evaluate_by_code(program, inputs, uniforms, *, block):
    """The outputs of a program for all samples `[block]`; where they are no power of two, the last is repeated."""
    whole = 1 << (block - 1).bit_length()
    part, lanes = min(whole, MOST_SAMPLES), min(processor().lanes, whole)
    repeated = [jnp.concatenate([x, jnp.repeat(x[-1:], whole - block, axis=0)]) for x in inputs]
    arrays = [*repeated, *uniforms]
    emit, pointers, number, memory = new_program(lanes, len(arrays) + len(program.outputs))
    own, scratch = processor().accumulators, Scratch(emit, memory)
    writer = CodeWriter(emit, scratch, pointers[len(inputs) : len(arrays)], block=part, room=own)
    leaf = lambda node, place: Leaf(() if node.width is None else (node.width,), node.dtype, (place,), node.width)
    first = emit.builder.mul(number, emit.integer(part))
    read = {node for node in program.nodes() if node.op == "input"}
    held = [
        load_leaf(writer, leaf(node, 0), pointer, first)[0] if node in read else None
        for node, pointer in zip(program.inputs, pointers, strict=False)
    ]
    found = writer.write(schedule_of(program), held)
    for n, node in enumerate(program.outputs):
        store_leaf(writer, leaf(node, n), found, pointers[len(arrays) + n], first)
    emit.builder.ret_void()
    shape = lambda node: (whole,) if node.width is None else (whole, node.width)
    outputs = tuple(jax.ShapeDtypeStruct(shape(node), np.dtype(node.dtype)) for node in program.outputs)
    kernel = NativeKernel(emit.module, whole // part, max(scratch.size, ALIGNMENT), outputs)
    return [x[:block] for x in call(kernel, [jnp.asarray(x) for x in arrays])]
