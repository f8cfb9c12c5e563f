"""Registers machine code with XLA as custom calls.

The foreign function interface of XLA is stable (xla/ffi/api/c_api.h, version 0), and the offsets below belong to
it.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import INT32, INT64, POINTER, Emitter, Value, byte, read, variable
from rollmill.fusion.backends.cpu.sharing import SharedPrograms
from rollmill.fusion.backends.cpu.target import function_address, processor
from rollmill.lowerings.foreign_calls import register_call

FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_STAGE = range(8, 40, 8)
FRAME_ARGUMENTS, FRAME_RESULTS = 40 + 32, 80 + 32
"""Bytes from the start of a call's frame."""
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
API_VERSION, METADATA_VERSION = 16, 8
"""Offsets of the version: in the interface, and in a handler's own metadata."""
MAJOR, MINOR = 16, 20
OWN_MAJOR = 0
"""Major version of the XLA interface. In other major versions the fields have other offsets."""
BUFFER_DATA = 24
IS_METADATA, IS_EXECUTION = 1, 3

PROGRAM, HANDLER = "program", "handler"

_registered: set[str] = set()
_registering = threading.Lock()


class NativeKernel(NamedTuple):
    """The LLVM IR of a CPU kernel, and the information needed to call it."""

    module: ir.Module
    """LLVM module that defines `program(arrays, number, scratch)`, where `arrays` points to the inputs followed by
    the outputs."""
    programs: int
    """Number of calls of `program`, each with an index from 0 on."""
    scratch: int
    """Scratch memory for each core in bytes, a multiple of 64."""
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    written_out: bool = False
    """Whether loops are already unrolled, so that LLVM leaves them as they are."""
    aliases: Mapping[int, int] = {}
    """Maps inputs that are updated in place to the outputs that they become, by index."""


class NewProgram(NamedTuple):
    """An LLVM function `program` without a body, and its arguments."""

    emit: Emitter
    pointers: list[Value]
    """Pointers to the inputs, followed by pointers to the outputs."""
    number: Value
    """Number of the current call, from 0 on."""
    scratch: Value
    """Pointer to the scratch memory of the current core."""


def new_program(lanes: int, arrays: int) -> NewProgram:
    """Creates an LLVM module with an empty function `program` of `arrays` inputs and outputs.

    `lanes` is the number of elements in a vector register.
    """
    module = ir.Module("rollmill")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT64, POINTER]), PROGRAM)
    function.linkage = "internal"
    emit, (given, number, scratch) = Emitter(function, lanes), function.args
    with emit.once():
        pointers = [emit.builder.load(emit.at(given, n, POINTER), typ=POINTER) for n in range(arrays)]
    return NewProgram(emit, pointers, number, scratch)


def call(kernel: NativeKernel, arrays: Sequence[Array]) -> list[Array]:
    """Calls a CPU kernel from traced JAX code, and returns its outputs.

    Under `jax.vmap` the kernel is called once per lane, each time on all cores.
    """
    name = _register(kernel, len(arrays))
    cores = min(kernel.programs, processor().cores)
    scratch = jax.ShapeDtypeStruct((cores, kernel.scratch), jax.numpy.uint8)
    call_it = jax.ffi.ffi_call(
        name,
        [*kernel.outputs, scratch],
        vmap_method="sequential",
        input_output_aliases=dict(kernel.aliases) or None,
    )
    return list(call_it(*arrays))[:-1]


def _register(kernel: NativeKernel, inputs: int) -> str:
    """Registers a kernel with XLA, and returns its name there."""
    _write_handler(kernel, inputs)
    text = str(kernel.module)
    name = f"rollmill_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    with _registering:
        if name not in _registered:
            address = function_address(text, HANDLER, written_out=kernel.written_out)
            register_call(name, address)
            _registered.add(name)
    return name


# --- what XLA calls ------------------------------------------------------------------------------------------


def _write_handler(kernel: NativeKernel, inputs: int) -> None:
    """Writes the function that XLA calls. It reads the pointers and divides the programs among the cores."""
    program, threads = kernel.module.globals[PROGRAM], min(kernel.programs, processor().cores)
    shared = SharedPrograms(program, kernel.programs, kernel.scratch)
    function = ir.Function(kernel.module, ir.FunctionType(POINTER, [POINTER]), HANDLER)
    emit, (frame,) = Emitter(function, 1), function.args
    builder, null = emit.builder, ir.Constant(POINTER, None)
    extension = read(builder, frame, FRAME_EXTENSION)
    with builder.if_then(builder.icmp_unsigned("!=", extension, null)):
        kind = read(builder, extension, EXTENSION_TYPE, INT32)
        with builder.if_then(builder.icmp_signed("==", kind, INT32(IS_METADATA))):
            _say_version(builder, frame, extension)
            builder.ret(null)
    stage = read(builder, frame, FRAME_STAGE, INT32)
    with builder.if_then(builder.icmp_signed("!=", stage, INT32(IS_EXECUTION))):
        builder.ret(null)
    pointers, scratch = _pointers(builder, frame, inputs, len(kernel.outputs))
    api, context = (read(builder, frame, place) for place in (FRAME_API, FRAME_CONTEXT))
    shared.write_call(emit, api, context, pointers, scratch, threads - 1)
    builder.ret(null)


def _say_version(builder: ir.IRBuilder, frame: Value, extension: Value) -> None:
    """Writes code that reports the version of the interface.

    Minor versions only extend the frame, so the caller's minor version is returned. XLA rejects another major
    version.
    """
    metadata = read(builder, extension, EXTENSION_METADATA)
    own = byte(builder, read(builder, frame, FRAME_API), API_VERSION)
    said = byte(builder, metadata, METADATA_VERSION)
    builder.store(INT32(OWN_MAJOR), byte(builder, said, MAJOR))
    builder.store(read(builder, own, MINOR, INT32), byte(builder, said, MINOR))


def _pointers(builder: ir.IRBuilder, frame: Value, inputs: int, outputs: int) -> tuple[Value, Value]:
    """Returns the array of pointers to inputs and outputs, and the pointer to scratch memory."""
    found = variable(builder, ir.ArrayType(POINTER, inputs + outputs))
    buffers = [(FRAME_ARGUMENTS, n) for n in range(inputs)] + [(FRAME_RESULTS, n) for n in range(outputs + 1)]
    data = [read(builder, read(builder, read(builder, frame, side), 8 * n), BUFFER_DATA) for side, n in buffers]
    for n, pointer in enumerate(data[:-1]):
        builder.store(pointer, byte(builder, found, 8 * n))
    return found, data[-1]
