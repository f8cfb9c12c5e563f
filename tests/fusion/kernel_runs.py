"""Runs programs as kernels on a GPU, as `evaluate` runs them by JAX's own functions, or only compiles them."""

import jax
import jax.numpy as jnp

from rollmill.fusion.backends.triton.codegen import TritonWriter
from rollmill.fusion.backends.triton.compile import Kernel, call, compile_for
from rollmill.fusion.backends.triton.leaf_io import LeafIO
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.opt.schedule import schedule_of

BLOCK = 16


def kernel_of(program, num_inputs, num_uniforms, block):
    """A kernel whose arrays are the inputs of a program, then what all samples have in common."""
    uniform = [f"uniform{n}" for n in range(num_uniforms)]
    source = KernelSource("float32", uniform)
    writer = TritonWriter(source)
    leaf = lambda node, place: Leaf(() if node.width is None else (node.width,), node.dtype, (place,), node.width)
    taken = {node.attributes[0]: node for node in program.nodes() if node.op == "input"}
    places = LeafIO(source, "here")
    load = lambda n: places.load(f"in{n}", "env", leaf(taken[n], 0))[0]
    names = [load(n) if n in taken else "" for n in range(num_inputs)]
    found = writer.write(schedule_of(program, segmented=True), names)
    for n, node in enumerate(program.outputs):
        places.store(f"out{n}", "env", leaf(node, n), [found[n]])
    pointers = [
        *(f"in{n}" for n in range(num_inputs)),
        *uniform,
        *(f"out{n}" for n in range(len(program.outputs))),
    ]
    head = [
        "@triton.jit",
        f"def kernel({', '.join(pointers)}, N: tl.constexpr, BLOCK: tl.constexpr):",
        "    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "    here = env < N",
    ]
    text = "\n".join([*head, *source.before.lines, *source.lines]) + "\n"
    shape = lambda node: (block,) if node.width is None else (block, node.width)
    outputs = tuple(jax.ShapeDtypeStruct(shape(node), node.dtype) for node in program.outputs)
    return Kernel(text, -(-block // BLOCK), outputs, {"N": block, "BLOCK": BLOCK}, 1, num_uniforms)


def evaluate_by_kernel(program, inputs, uniforms, *, block):
    """The outputs of a program for all samples `[block]`."""
    if not program.outputs:
        return []
    return call(kernel_of(program, len(inputs), len(uniforms), block), [*inputs, *uniforms])


def zeros_by_kernel(program, inputs, uniforms, *, block):
    """Zeros instead of the outputs of a program, which has compiled for a GPU that is not here."""
    kernel = kernel_of(program, len(inputs), len(uniforms), block)
    arrays = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*inputs, *uniforms)]
    if program.outputs:
        assert ".target sm_90" in compile_for(kernel, arrays, 90).asm["ptx"]
    return [jnp.zeros(struct.shape, struct.dtype) for struct in kernel.outputs]
