"""Compiles Threefry-2x32 to machine code for programs that XLA compiles for a CPU, and registers it with XLA.

LLVM compiles the code, and the cache keeps its instructions. They refer to no other code or data, so a process
that finds them in the cache only copies them to executable memory, and imports no compiler.
"""

import ctypes
import hashlib
import json
import mmap
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.installation import cache_root, read_verified, write_verified
from rollmill.core.machine import identify_processor, installed_version
from rollmill.lowerings.foreign_calls import register_call
from rollmill.lowerings.threefry import PARITY, ROTATIONS, THREEFRY_CALL, TURNS

FOLDER = "code"
MAX_BYTES = 2**16
"""Maximum size of the code in bytes. For processors with AVX2 it has 2,917 bytes, and with AVX-512 up to 4,169."""

TESTED = ("linux", "x86_64")
"""Operating system and architecture on which the code has been tested. Others leave random numbers to XLA."""

TYPES = """\
%Version = type { i64, ptr, i32, i32 }
%Api = type { i64, ptr, %Version }
%Metadata = type { i64, %Version }
%Extension = type { i64, i32, ptr, ptr }
%Arrays = type { i64, ptr, i64, ptr, ptr }
%Frame = type { i64, ptr, ptr, ptr, i32, %Arrays, %Arrays }
%Buffer = type { i64, ptr, i32, ptr, i64, ptr }
"""
"""Structures of XLA's foreign function interface (xla/ffi/api/c_api.h, version 0), up to the last field in use."""

_lock = threading.Lock()
_mappings: list[mmap.mmap] = []  # memory is freed with its mapping, so mappings are kept


def register_threefry() -> bool:
    """Registers the machine code with XLA under the name `THREEFRY_CALL`, unless it is registered.

    The function takes two keys and two counters. Counters and both results have the same shape. Both keys
    have this shape, too, or are scalars. Returns False if there is no code for this machine.
    """
    with _lock:
        return _is_registered()


@cache
def _is_registered() -> bool:
    """Registers the machine code in the first call."""
    try:
        code = _instructions()
        if code is not None:
            register_call(THREEFRY_CALL, _executable(code))
        return code is not None
    except (UsageError, ImportError, OSError, RuntimeError):
        # an unsafe cache, no LLVM, no executable memory, or another version of XLA
        return False


def _instructions() -> bytes | None:
    """Returns the machine code from the cache, or compiles and stores it. Returns None if there is none."""
    llvm = installed_version("llvmlite")
    if llvm is None or (sys.platform, platform.machine()) != TESTED:
        return None
    source = threefry_source()
    known = json.dumps(["threefry", source, llvm, identify_processor()])
    file = cache_root() / FOLDER / hashlib.sha256(known.encode()).hexdigest()[:24]
    code = read_verified(file, MAX_BYTES)
    if code is None and (code := compile_instructions(source)) is not None:
        write_verified(file, code)
    return code


def compile_instructions(source: str) -> bytes | None:
    """Compiles LLVM IR with a single function for this processor, and returns the function's instructions.

    Returns None if the instructions depend on where they and other data are in memory.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source)
    module.verify()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc="pic", codemodel="small"
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return instructions_of(llvm.ObjectFileRef.from_data(machine.emit_object(module)))


def instructions_of(file: Any) -> bytes | None:
    """Returns the instructions of an object file, or None if the file has relocations or data."""
    sections = {section.name().decode(): section.data() for section in file.sections() if section.size()}
    has_others = any(name.startswith((".rela.text", ".rel.text", ".rodata", ".data", ".bss")) for name in sections)
    return None if has_others else sections.get(".text")


def _executable(code: bytes) -> int:
    """Copies machine code to memory that can be executed and no longer written, and returns its address."""
    mapping = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    _mappings.append(mapping)
    return address


# --- the source ----------------------------------------------------------------------------------------------

ARRAYS = ("key_0", "key_1", "count_0", "count_1", "word_0", "word_1")
"""Operands of the call, followed by its results."""


def threefry_source() -> str:
    """Returns the LLVM IR of the function that XLA calls. All other functions become part of it.

    XLA also calls it to ask for its version, and before the first execution. These calls are answered. Minor
    versions only extend the structures, so the caller's is returned. XLA rejects another major version.
    """
    words = ", ".join(f"ptr %{array}.data" for array in ARRAYS)
    buffers = "\n".join(_buffer(array, number) for number, array in enumerate(ARRAYS))
    return f"""{TYPES}
define ptr @threefry(ptr %frame) nounwind {{
{_read("extension", "ptr", "Frame", "frame", 1)}
  %is_call = icmp eq ptr %extension, null
  br i1 %is_call, label %call, label %extended
extended:
{_read("kind", "i32", "Extension", "extension", 1)}
  %asks_version = icmp eq i32 %kind, 1
  br i1 %asks_version, label %version, label %call
version:
{_read("api", "ptr", "Frame", "frame", 2)}
{_read("minor", "i32", "Api", "api", 2, 3)}
{_read("metadata", "ptr", "Extension", "extension", 3)}
{_field("own_major", "Metadata", "metadata", 1, 2)}
{_field("own_minor", "Metadata", "metadata", 1, 3)}
  store i32 0, ptr %own_major
  store i32 %minor, ptr %own_minor
  ret ptr null
call:
{_read("stage", "i32", "Frame", "frame", 4)}
  %executes = icmp eq i32 %stage, 3
  br i1 %executes, label %execution, label %end
execution:
{_read("operands", "ptr", "Frame", "frame", 5, 4)}
{_read("results", "ptr", "Frame", "frame", 6, 4)}
{buffers}
{_read("key_rank", "i64", "Buffer", "key_0", 4)}
{_read("rank", "i64", "Buffer", "word_0", 4)}
{_read("sizes", "ptr", "Buffer", "word_0", 5)}
  br label %axes
axes:
  %axis = phi i64 [ 0, %execution ], [ %next_axis, %product ]
  %size = phi i64 [ 1, %execution ], [ %next_size, %product ]
  %has_size = icmp eq i64 %axis, %rank
  br i1 %has_size, label %sized, label %product
product:
  %length.at = getelementptr i64, ptr %sizes, i64 %axis
  %length = load volatile i64, ptr %length.at
  %next_size = mul i64 %size, %length
  %next_axis = add i64 %axis, 1
  br label %axes
sized:
  %is_empty = icmp eq i64 %size, 0
  br i1 %is_empty, label %end, label %filled
filled:
  %has_one_key = icmp eq i64 %key_rank, 0
  br i1 %has_one_key, label %one, label %many
one:
  call void @with_one_key({words}, i64 %size)
  ret ptr null
many:
  call void @with_many_keys({words}, i64 %size)
  ret ptr null
end:
  ret ptr null
}}
{_words_function("with_one_key", "0")}
{_words_function("with_many_keys", "%index")}
"""


def _field(name: str, struct: str, pointer: str, *path: int) -> str:
    indices = "".join(f", i32 {number}" for number in path)
    return f"  %{name} = getelementptr %{struct}, ptr %{pointer}, i32 0{indices}"


def _read(name: str, kind: str, struct: str, pointer: str, *path: int) -> str:
    return f"{_field(f'{name}.at', struct, pointer, *path)}\n  %{name} = load {kind}, ptr %{name}.at"


def _buffer(array: str, number: int) -> str:
    """Reads the address of an array's description, and from there the address of its elements."""
    side, index = ("operands", number) if number < 4 else ("results", number - 4)
    at = f"  %{array}.at = getelementptr ptr, ptr %{side}, i64 {index}"
    return f"{at}\n  %{array} = load ptr, ptr %{array}.at\n{_read(f'{array}.data', 'ptr', 'Buffer', array, 3)}"


def _words_function(name: str, key_index: str) -> str:
    """Returns a function that computes `size` > 0 words of each result in a loop, which LLVM vectorises."""
    arguments = ", ".join(f"ptr {'noalias ' * array.startswith('word')}%{array}" for array in ARRAYS)
    at = lambda array, index: f"  %{array}.at = getelementptr i32, ptr %{array}, i64 {index}"
    load = lambda array, index: f"{at(array, index)}\n  %{array}.0 = load i32, ptr %{array}.at"
    loads = [load(array, key_index if array.startswith("key") else "%index") for array in ARRAYS[:4]]
    constants, operations, (first, second) = _operations()
    stores = [
        f"{at(array, '%index')}\n  store i32 {word}, ptr %{array}.at"
        for array, word in zip(ARRAYS[4:], (first, second), strict=True)
    ]
    lines = "\n".join
    return f"""
define internal void @{name}({arguments}, i64 %size) nounwind alwaysinline {{
start:
{lines(constants)}
  br label %loop
loop:
  %index = phi i64 [ 0, %start ], [ %next, %loop ]
{lines(loads)}
{lines(operations)}
{lines(stores)}
  %next = add nuw nsw i64 %index, 1
  %ends = icmp eq i64 %next, %size
  br i1 %ends, label %end, label %loop
end:
  ret void
}}"""


def _operations() -> tuple[list[str], list[str], Sequence[str]]:
    """Returns the definitions of constants, the operations for one index, and both random words.

    The constants pass through empty assembly. Otherwise, LLVM would place vectors of them in memory, and rotate by
    whole bytes according to vectors of positions in memory, and the code would depend on data.
    """
    constants = {number: f"%constant_{number}" for number in (PARITY, *range(1, TURNS + 1), 8, 16, 24)}
    hidden = [f'  {name} = call i32 asm "", "=r,0"(i32 {number})' for number, name in constants.items()]
    numbers: Iterator[int] = count(1)
    operations: list[str] = []

    def apply(operation: str, a: str, b: str | int) -> str:
        result = f"%value_{next(numbers)}"
        operand = constants.get(b, b) if isinstance(b, int) else b
        operations.append(f"  {result} = {operation} i32 {a}, {operand}")
        return result

    keys = ["%key_0.0", "%key_1.0", apply("xor", apply("xor", "%key_0.0", "%key_1.0"), PARITY)]
    x, y = apply("add", "%count_0.0", keys[0]), apply("add", "%count_1.0", keys[1])
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = apply("add", x, y)
            y = apply("xor", x, apply("or", apply("shl", y, distance), apply("lshr", y, 32 - distance)))
        x = apply("add", x, keys[(turn + 1) % 3])
        y = apply("add", apply("add", y, keys[(turn + 2) % 3]), turn + 1)
    return hidden, operations, (x, y)
