"""Generates loads and stores, as Triton operations or as inline PTX instructions.

Triton schedules its own loads and stores well. But for each of them it analyses everything in the kernel that
depends on it, which takes hours for a long program. An inline instruction is an ordinary expression to that
analysis.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Memory(NamedTuple):
    """Functions that generate loads and stores at pointers, with masks, as Triton source."""

    read: Callable[[str, Sequence[str]], str]
    """Returns an expression that loads values, `read(pointers, masks)`. It is zero if any mask is false."""
    write: Callable[[str, str, Sequence[str]], str]
    """Returns a statement that stores values for which all masks are true: `write(pointers, values, masks)`."""
    few: int
    """Maximum number of scalars of a leaf to load or store one by one. Larger leaves use vector instructions."""
    four: str | None = None
    """Name of the function that loads four consecutive words as four scalars, or None to load them as a row."""


def _load(places: str, checks: Sequence[str]) -> str:
    mask = f", mask={' & '.join(checks)}, other=0" if checks else ""
    return f"tl.load({places}{mask})"


def _store(places: str, numbers: str, checks: Sequence[str]) -> str:
    mask = f", mask={' & '.join(checks)}" if checks else ""
    return f"tl.store({places}, {numbers}{mask})"


def _read(places: str, checks: Sequence[str]) -> str:
    return f"read_where({places}, {' & '.join(checks)})" if checks else f"read({places})"


def _write(places: str, numbers: str, checks: Sequence[str]) -> str:
    return f"write_where({places}, {numbers}, {' & '.join(checks) or EVERYWHERE})"


EVERYWHERE = "tl.full([1, 1], True, tl.int1)"

BY_TRITON = Memory(_load, _store, few=4)
BY_INSTRUCTIONS = Memory(_read, _write, few=0, four="read_four")
"""Access by inline PTX instructions to 32-bit elements. Other types use Triton operations."""

HELPERS = """\
@triton.jit
def read(pointers):
    number: tl.constexpr = pointers.dtype.element_ty
    if number.primitive_bitwidth == 32:
        text: tl.constexpr = "ld.global.b32 $0, [$1];"
        places = [pointers.to(tl.int64)]
        return tl.inline_asm_elementwise(text, "=r,l", places, tl.int32, True, 1).to(number, bitcast=True)
    else:
        return tl.load(pointers)


@triton.jit
def read_cell(pointers):
    number: tl.constexpr = pointers.dtype.element_ty
    places = [pointers.to(tl.int64)]
    if number.primitive_bitwidth == 32:
        text: tl.constexpr = "ld.global.b32 $0, [$1];"
        return tl.inline_asm_elementwise(text, "=r,l", places, tl.int32, False, 1).to(number, bitcast=True)
    elif number.primitive_bitwidth == 16:
        text: tl.constexpr = "ld.global.b16 $0, [$1];"
        word = tl.inline_asm_elementwise(text, "=r,l", places, tl.int32, False, 1)
        return word.to(tl.int16).to(number, bitcast=True)
    elif number.primitive_bitwidth == 8:
        text: tl.constexpr = "ld.global.b8 $0, [$1];"
        return tl.inline_asm_elementwise(text, "=r,l", places, tl.int32, False, 1).to(number)
    else:
        text: tl.constexpr = "ld.global.b8 $0, [$1];"
        return (tl.inline_asm_elementwise(text, "=r,l", places, tl.int32, False, 1) & 255) != 0


@triton.jit
def write_cell(pointers, numbers, inside):
    number: tl.constexpr = pointers.dtype.element_ty
    begin: tl.constexpr = "{ .reg .pred inside; setp.ne.b32 inside, $3, 0; @inside "
    end: tl.constexpr = " [$1], $2; mov.b32 $0, 0; }"
    if number.primitive_bitwidth == 32:
        text: tl.constexpr = begin + "st.global.b32" + end
        words = numbers.to(number).to(tl.int32, bitcast=True)
    elif number.primitive_bitwidth == 16:
        text: tl.constexpr = begin + "st.global.b16" + end
        words = numbers.to(number).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        text: tl.constexpr = begin + "st.global.b8" + end
        words = numbers.to(tl.int32)
    places = [pointers.to(tl.int64), words, inside.to(tl.int32)]
    tl.inline_asm_elementwise(text, "=r,l,r,r", places, tl.int32, False, 1)


@triton.jit
def read_where(pointers, inside):
    number: tl.constexpr = pointers.dtype.element_ty
    if number.primitive_bitwidth == 32:
        text: tl.constexpr = (
            "{ .reg .pred inside; setp.ne.b32 inside, $2, 0; mov.b32 $0, 0; @inside ld.global.b32 $0, [$1]; }"
        )
        places = [pointers.to(tl.int64), inside.to(tl.int32)]
        return tl.inline_asm_elementwise(text, "=&r,l,r", places, tl.int32, True, 1).to(number, bitcast=True)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def read_four(pointers):
    text: tl.constexpr = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    places = [pointers.to(tl.int64)]
    return tl.inline_asm_elementwise(
        text, "=r,=r,=r,=r,l", places, (tl.uint32, tl.uint32, tl.uint32, tl.uint32), True, 1
    )


@triton.jit
def write_where(pointers, numbers, inside):
    number: tl.constexpr = pointers.dtype.element_ty
    if number.primitive_bitwidth == 32:
        text: tl.constexpr = (
            "{ .reg .pred inside; setp.ne.b32 inside, $3, 0; @inside st.global.b32 [$1], $2; mov.b32 $0, 0; }"
        )
        places = [pointers.to(tl.int64), numbers.to(number).to(tl.int32, bitcast=True), inside.to(tl.int32)]
        tl.inline_asm_elementwise(text, "=r,l,r,r", places, tl.int32, False, 1)
    else:
        tl.store(pointers, numbers, mask=inside)
"""
"""Source of the Triton functions that `BY_INSTRUCTIONS` calls."""
