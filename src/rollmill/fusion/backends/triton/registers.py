"""Scalars packed into the rows that matrix products take, and columns of rows as scalars again."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollmill.fusion.backends.triton.source import KernelSource

ZERO, ONE = "tl.zeros([BLOCK], tl.float32)", "tl.full([BLOCK], 1.0, tl.float32)"


def pack_row(source: KernelSource, parts: Sequence[str]) -> str:
    """Returns a row of scalars, in the type that products take, that stays in the registers of its thread."""
    cast = ".to(tl.bfloat16)" if source.numerics == "bfloat16" else ""
    return interleave(source, [part + cast for part in parts])


def interleave(source: KernelSource, parts: Sequence[str]) -> str:
    """Returns a row of scalars, as many as a power of two, that stays in the registers of its thread."""
    if len(parts) == 1:
        return parts[0]
    # `tl.join` puts two tensors side by side in the last axis, so even and odd parts come in turns again.
    even, odd = interleave(source, parts[::2]), interleave(source, parts[1::2])
    name = source.fresh()
    source.line(f"{name} = tl.reshape(tl.join({even}, {odd}), [BLOCK, {len(parts)}])")
    return name


def pack_by_select(source: KernelSource, parts: Sequence[str], onto: tuple[str, int] | None = None) -> str:
    """Returns a row of scalars, each selected by its column: it lies as tensor cores take it.

    `onto` is a row that has the first of them already, and how many.
    """
    column = source.before.columns(len(parts))
    tile, known = onto or (f"tl.zeros([BLOCK, {len(parts)}], tl.float32)", 0)
    for place, part in enumerate(parts):
        if place >= known and part != ZERO:
            tile = f"tl.where({column}[None, :] == {place}, {part}[:, None], {tile})"
    name = source.fresh()
    source.line(f"{name} = {tile}")
    return name


# --- and apart again ----------------------------------------------------------------------------------------


class LayoutChange(NamedTuple):
    """Changes of layout between rows and scalars, as expressions."""

    scalar: Callable[[str], str]
    """From a number that was computed from each row to a scalar."""
    column: Callable[[str, int, int], str]
    """`(rows, how many columns they have, which one)`."""
    into: Callable[[str], str] = str
    """From a scalar to one that is repeated in the columns of a row."""


def _chosen(rows: str, columns: int, column: int) -> str:
    return f"tl.sum(tl.where(tl.arange(0, {columns})[None, :] == {column}, {rows}, 0), axis=1)"


def _one_each(scalars: str) -> str:
    return f"tl.gather({scalars}, tl.arange(0, BLOCK), 0)"


def _gathered(rows: str, columns: int, column: int) -> str:
    flat = f"tl.reshape({rows}, [BLOCK * {columns}])"
    return f"tl.gather({flat}, tl.arange(0, BLOCK) * {columns} + {column}, 0)"


KEEP_LAYOUT = LayoutChange(str, _chosen)
"""Scalars stay where a product of matrices leaves them: with four threads each, beside the rows they came from."""

ENV_PER_THREAD = LayoutChange(_one_each, _gathered)
"""Scalars are moved to where each thread has those of its own environments alone.

All that is computed from them, which is the whole environment, would else be computed four times over. Gathering
changes where they lie and nothing else.
"""

ENV_PER_THREAD_BOTH_WAYS = LayoutChange(_one_each, _gathered, _one_each)
"""Like `ENV_PER_THREAD`, with a gather before scalars go into rows as well.

Products on the ordinary units may take their left side with all rows of a block in every warp. Triton 3.6
rematerialises the scalars in the rows' layout, with all that they come from: the whole environment, 32 times over.
It does not rematerialise through `tl.gather`.
"""
