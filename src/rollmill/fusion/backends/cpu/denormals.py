"""Makes machine code flush denormal floats to zero, as XLA does on CPUs.

XLA enables flushing in its own compute threads, but not in all threads that it lends out. Without this module,
results would depend on which thread computes them.
"""

import platform
from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import INT32, INT64, POINTER, Emitter

X86_FLUSH = 1 << 15 | 1 << 6
"""Bits of the x86 register MXCSR that make denormal results zero and read denormal operands as zero."""
ARM_FLUSH = 1 << 24
"""Bit of the ARM register FPCR that makes denormal results zero and reads denormal operands as zero."""


class Mode(NamedTuple):
    """The denormal mode that a thread had before flushing was enabled."""

    restore: Callable[[], object]
    """Emits instructions that restore this mode."""


def flush_denormals(emit: Emitter) -> Mode:
    """Emits instructions that make the running thread flush denormal floats to zero. Returns the previous mode."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        return _flush_on_x86(emit)
    if machine in ("aarch64", "arm64"):
        return _flush_on_arm(emit)
    return Mode(lambda: None)


def _flush_on_x86(emit: Emitter) -> Mode:
    builder, before, flushing = emit.builder, emit.slot(INT32), emit.slot(INT32)
    get, set_ = (
        emit.declared(f"llvm.x86.sse.{name}", ir.VoidType(), [POINTER]) for name in ("stmxcsr", "ldmxcsr")
    )
    builder.call(get, [before])
    builder.store(builder.or_(builder.load(before, typ=INT32), INT32(X86_FLUSH)), flushing)
    builder.call(set_, [flushing])
    return Mode(lambda: builder.call(set_, [before]))


def _flush_on_arm(emit: Emitter) -> Mode:
    builder = emit.builder
    get = ir.InlineAsm(ir.FunctionType(INT64, []), "mrs $0, fpcr", "=r", side_effect=True)
    set_ = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [INT64]), "msr fpcr, $0", "r", side_effect=True)
    before = builder.call(get, [])
    builder.call(set_, [builder.or_(before, INT64(ARM_FLUSH))])
    return Mode(lambda: builder.call(set_, [before]))
