"""Runs programs as machine code, as `evaluate` runs them by JAX's own functions."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.backends.cpu.ffi import PROGRAM, NativeKernel, call, new_program
from rollmill.fusion.backends.cpu.leaf_io import load_leaf, store_leaf
from rollmill.fusion.backends.cpu.memory import ALIGNMENT, Scratch
from rollmill.fusion.backends.cpu.target import function_address, processor
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.opt.schedule import schedule_of

MAX_SAMPLES = 64
"""Samples of a block; what is done with them is written out, vector by vector."""


def evaluate_by_code(program, inputs, uniforms, *, block):
    """The outputs of a program for all samples `[block]`; where they are no power of two, the last is repeated."""
    whole = 1 << (block - 1).bit_length()
    repeated = [jnp.concatenate([x, jnp.repeat(x[-1:], whole - block, axis=0)]) for x in inputs]
    arrays = [jnp.asarray(x) for x in (*repeated, *uniforms)]
    return [x[:block] for x in call(kernel_of(program, len(inputs), len(uniforms), whole), arrays)]


def kernel_of(program, num_inputs, num_uniforms, whole, most=MAX_SAMPLES):
    """The kernel of a program for so many samples, a power of two, in blocks of `most`."""
    part, lanes = min(whole, most), min(processor().lanes, whole)
    count = num_inputs + num_uniforms
    emit, pointers, number, memory = new_program(lanes, count + len(program.outputs))
    own, scratch = processor().accumulators, Scratch(emit, memory)
    writer = CodeWriter(emit, scratch, pointers[num_inputs:count], block=part, room=own)
    leaf = lambda node, place: Leaf(() if node.width is None else (node.width,), node.dtype, (place,), node.width)
    first = emit.builder.mul(number, emit.integer(part))
    read = {node for node in program.nodes() if node.op == "input"}
    held = [
        load_leaf(writer, leaf(node, 0), pointer, first)[0] if node in read else None
        for node, pointer in zip(program.inputs, pointers, strict=False)
    ]
    found = writer.write(schedule_of(program), held)
    for n, node in enumerate(program.outputs):
        store_leaf(writer, leaf(node, n), found, pointers[count + n], first)
    emit.builder.ret_void()
    shape = lambda node: (whole,) if node.width is None else (whole, node.width)
    outputs = tuple(jax.ShapeDtypeStruct(shape(node), np.dtype(node.dtype)) for node in program.outputs)
    return NativeKernel(emit.module, whole // part, max(scratch.size, ALIGNMENT), outputs)


def run_code(program, inputs, uniforms, *, block):
    """As `evaluate_by_code`, of a power of two of samples, for arrays of NumPy and without a program of XLA's."""
    kernel = kernel_of(program, len(inputs), len(uniforms), block, processor().lanes)
    kernel.module.globals[PROGRAM].linkage = "external"
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
        function_address(str(kernel.module), PROGRAM)
    )
    outputs = [np.zeros(struct.shape, struct.dtype) for struct in kernel.outputs]
    arrays = [*map(np.ascontiguousarray, (*inputs, *uniforms)), *outputs]
    memory = np.zeros(kernel.scratch + ALIGNMENT, np.uint8)
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    for number in range(kernel.programs):
        run(ctypes.addressof(pointers), number, memory.ctypes.data + -memory.ctypes.data % ALIGNMENT)
    return outputs
