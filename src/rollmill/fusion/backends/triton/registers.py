"""Packs scalars into rows for matrix products, and extracts columns of rows as scalars."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollmill.fusion.backends.triton.source import KernelSource

ZERO, ONE = "tl.zeros([BLOCK], tl.float32)", "tl.full([BLOCK], 1.0, tl.float32)"


def pack_row(source: KernelSource, parts: Sequence[str]) -> str:
    """Builds a row from scalars, converted to bfloat16 if matrix products use it. Returns the row's name."""
    cast = ".to(tl.bfloat16)" if source.numerics == "bfloat16" else ""
    return interleave(source, [part + cast for part in parts])


def interleave(source: KernelSource, parts: Sequence[str]) -> str:
    """Emits code that joins scalars into a row, and returns the row's name. Each thread builds the row of its own
    sample. The number of scalars must be a power of two.
    """
    if len(parts) == 1:
        return parts[0]
    # `tl.join` adds a last axis with both tensors, so even and odd parts alternate again.
    even, odd = interleave(source, parts[::2]), interleave(source, parts[1::2])
    name = source.fresh()
    source.line(f"{name} = tl.reshape(tl.join({even}, {odd}), [BLOCK, {len(parts)}])")
    return name


def pack_by_select(source: KernelSource, parts: Sequence[str], onto: tuple[str, int] | None = None) -> str:
    """Builds a row by selecting each scalar into its column, in the layout of tensor cores, and returns its name.

    `onto` is an optional row that already holds the first scalars, with their number.
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
    """Expressions that convert between the layouts of rows and scalars."""

    scalar: Callable[[str], str]
    """Converts a value computed from each row to the layout of scalars."""
    column: Callable[[str, int, int], str]
    """Extracts a column of rows as scalars: `column(rows, num_columns, index)`."""
    into: Callable[[str], str] = str
    """Converts a scalar to the layout in which it can be combined with rows."""


def _select_column(rows: str, columns: int, column: int) -> str:
    return f"tl.sum(tl.where(tl.arange(0, {columns})[None, :] == {column}, {rows}, 0), axis=1)"


def _one_each(scalars: str) -> str:
    return f"tl.gather({scalars}, tl.arange(0, BLOCK), 0)"


def _gather_column(rows: str, columns: int, column: int) -> str:
    flat = f"tl.reshape({rows}, [BLOCK * {columns}])"
    return f"tl.gather({flat}, tl.arange(0, BLOCK) * {columns} + {column}, 0)"


KEEP_LAYOUT = LayoutChange(str, _select_column)
"""Leaves scalars where a matrix product put them: each in four threads, next to the row that it came from."""

ENV_PER_THREAD = LayoutChange(_one_each, _gather_column)
"""Moves scalars so that each thread holds only the scalars of its own environments.

Otherwise everything computed from them, which is the whole environment, would be computed four times. A gather
moves the values without changing them."""

ENV_PER_THREAD_BOTH_WAYS = LayoutChange(_one_each, _gather_column, _one_each)
"""Like `ENV_PER_THREAD`, and also gathers scalars before they are put into rows.

Matrix products outside of tensor cores may need all rows of a block in every warp. Triton 3.6 would then recompute
the scalars in the layout of the rows, and with them the whole environment, 32 times. It does not recompute through
`tl.gather`."""
