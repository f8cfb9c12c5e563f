"""Makes machine code a custom call of XLA's: what XLA calls, and how the programs of a call share the cores.

XLA's foreign functions have a stable binary interface (xla/ffi/api/c_api.h, version 0); the offsets below are its.
"""

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array
from llvmlite import ir

from rollmill.fusion.native.emitter import INT32, INT64, POINTER, Emitter, Value, variable
from rollmill.fusion.native.processor import function_address, processor

FRAME_EXTENSION, FRAME_API, FRAME_STAGE, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 32, 40 + 32, 80 + 32
"""Bytes from the start of a call's frame."""
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
API_VERSION, METADATA_VERSION = 16, 8
"""Of the interface, where it says its own version, and where a handler says the one that it was made for."""
MAJOR, MINOR = 16, 20
OWN_MAJOR = 0
"""Another one moves what is in a frame."""
BUFFER_DATA = 24
IS_METADATA, IS_EXECUTION = 1, 3

PROGRAM, TASK, HANDLER = "program", "task", "handler"

_registered: set[str] = set()
_registering = threading.Lock()


class NativeKernel(NamedTuple):
    """Machine code before it is compiled."""

    module: ir.Module
    """Holds the function `program(arrays, number, scratch)`: `arrays` are pointers to inputs, then to outputs."""
    programs: int
    """How often it is called, with numbers from 0 on."""
    scratch: int
    """Bytes that one core needs, a multiple of 64."""
    outputs: tuple[jax.ShapeDtypeStruct, ...]


def new_module(lanes: int) -> tuple[ir.Module, Emitter]:
    """A module, and what writes the body of its program."""
    module = ir.Module("rollmill")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT64, POINTER]), PROGRAM)
    function.linkage = "internal"
    return module, Emitter(function, lanes)


def call(kernel: NativeKernel, arrays: Sequence[Array]) -> list[Array]:
    """Runs a kernel in the program that is being traced, on a CPU; returns its outputs."""
    name = _register(kernel, len(arrays))
    cores = min(kernel.programs, processor().cores)
    scratch = jax.ShapeDtypeStruct((cores, kernel.scratch), jax.numpy.uint8)
    return list(jax.ffi.ffi_call(name, [*kernel.outputs, scratch])(*arrays))[:-1]


def _register(kernel: NativeKernel, inputs: int) -> str:
    """The name by which XLA knows a kernel."""
    _write_handler(kernel, inputs)
    text = str(kernel.module)
    name = f"rollmill_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    with _registering:
        if name not in _registered:
            jax.ffi.register_ffi_target(name, _capsule(function_address(text, HANDLER)), platform="cpu")
            _registered.add(name)
    return name


def _capsule(address: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


# --- what XLA calls ------------------------------------------------------------------------------------------


def _write_handler(kernel: NativeKernel, inputs: int) -> None:
    """The function that XLA calls: it reads the pointers and shares the programs among the cores."""
    function = ir.Function(kernel.module, ir.FunctionType(POINTER, [POINTER]), HANDLER)
    builder = ir.IRBuilder(function.append_basic_block())
    null = ir.Constant(POINTER, None)
    extension = _read(builder, function.args[0], FRAME_EXTENSION)
    with builder.if_then(builder.icmp_unsigned("!=", extension, null)):
        kind = builder.load(_byte(builder, extension, EXTENSION_TYPE), typ=INT32)
        with builder.if_then(builder.icmp_signed("==", kind, INT32(IS_METADATA))):
            _say_version(builder, function.args[0], extension)
            builder.ret(null)
    stage = builder.load(_byte(builder, function.args[0], FRAME_STAGE), typ=INT32)
    with builder.if_then(builder.icmp_signed("!=", stage, INT32(IS_EXECUTION))):
        builder.ret(null)
    pointers, scratch = _pointers(builder, function.args[0], inputs, len(kernel.outputs))
    _share(kernel, builder, pointers, scratch)
    builder.ret(null)


def _say_version(builder: ir.IRBuilder, frame: Value, extension: Value) -> None:
    """With the caller's minor version, which only adds to a frame; XLA refuses a handler of another major one."""
    metadata = _read(builder, extension, EXTENSION_METADATA)
    own = _byte(builder, _read(builder, frame, FRAME_API), API_VERSION)
    said = _byte(builder, metadata, METADATA_VERSION)
    builder.store(INT32(OWN_MAJOR), _byte(builder, said, MAJOR))
    builder.store(builder.load(_byte(builder, own, MINOR), typ=INT32), _byte(builder, said, MINOR))


def _pointers(builder: ir.IRBuilder, frame: Value, inputs: int, outputs: int) -> tuple[Value, Value]:
    """An array of the pointers to inputs and outputs; and the pointer to the memory for scratch."""
    found = variable(builder, ir.ArrayType(POINTER, inputs + outputs))
    buffers = [(FRAME_ARGUMENTS, n) for n in range(inputs)] + [(FRAME_RESULTS, n) for n in range(outputs + 1)]
    data = [_read(builder, _read(builder, _read(builder, frame, side), 8 * n), BUFFER_DATA) for side, n in buffers]
    for n, pointer in enumerate(data[:-1]):
        builder.store(pointer, _byte(builder, found, 8 * n))
    return found, data[-1]


def _share(kernel: NativeKernel, builder: ir.IRBuilder, pointers: Value, scratch: Value) -> None:
    """One thread for each core but this one; where none can be had, its part is done here."""
    cores = min(kernel.programs, processor().cores)
    task = _write_task(kernel, cores)
    own = ir.LiteralStructType([POINTER, POINTER, INT64])
    tasks, threads = (variable(builder, ir.ArrayType(kind, cores)) for kind in (own, INT64))
    begin = ir.Function(kernel.module, ir.FunctionType(INT32, [POINTER] * 4), "pthread_create")
    wait = ir.Function(kernel.module, ir.FunctionType(INT32, [INT64, POINTER]), "pthread_join")
    null = ir.Constant(POINTER, None)
    parts = []
    for core in range(cores):
        part = _byte(builder, tasks, 24 * core)
        builder.store(pointers, part)
        builder.store(_byte(builder, scratch, core * kernel.scratch), _byte(builder, part, 8))
        builder.store(INT64(core), _byte(builder, part, 16))
        parts.append((part, _byte(builder, threads, 8 * core)))
    failed = [builder.call(begin, [thread, null, task, part]) for part, thread in parts[1:]]
    builder.call(task, [parts[0][0]])
    for (part, thread), status in zip(parts[1:], failed, strict=True):
        with builder.if_else(builder.icmp_signed("==", status, INT32(0))) as (began, refused):
            with began:
                builder.call(wait, [builder.load(thread, typ=INT64), null])
            with refused:
                builder.call(task, [part])


def _write_task(kernel: NativeKernel, cores: int) -> ir.Function:
    """What a core does: every so many programs, from its own number on."""
    function = ir.Function(kernel.module, ir.FunctionType(POINTER, [POINTER]), TASK)
    function.linkage = "internal"
    emit = Emitter(function, 1)
    pointers, scratch = (_read(emit.builder, function.args[0], place) for place in (0, 8))
    first = emit.builder.load(_byte(emit.builder, function.args[0], 16), typ=INT64)
    with emit.loop(kernel.programs, first=first, step=cores) as number:
        emit.builder.call(kernel.module.globals[PROGRAM], [pointers, number, scratch])
    emit.builder.ret(ir.Constant(POINTER, None))
    return function


def _byte(builder: ir.IRBuilder, pointer: Value, offset: int) -> Value:
    return builder.gep(pointer, [INT64(offset)], inbounds=True, source_etype=ir.IntType(8))


def _read(builder: ir.IRBuilder, pointer: Value, offset: int) -> Value:
    """The pointer that lies so many bytes further."""
    return builder.load(_byte(builder, pointer, offset), typ=POINTER)
