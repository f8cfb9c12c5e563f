"""Writes rows of each sample to memory, tile by tile, for matrix products after a gradient kernel."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollmill.core.machine import Numerics
from rollmill.fusion.backends.triton.hoist import columns
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.wide_gradients import StoredRow


class TiledLoops(NamedTuple):
    """The rows that the loops of a gradient kernel store, and the memory that they keep for matrix tiles."""

    stored: Sequence[StoredRow]
    kept: int
    """Kilobytes of matrix tiles that stay on the chip."""


class RowTileStore(NamedTuple):
    """A store to memory of one tile of a row."""

    tile: Node
    number: int
    """Number of the row among all stored rows."""
    first: int
    """The tile's first column in its row."""
    width: int
    """Number of columns of the row."""

    def write(self, source: KernelSource, name: str, mask: str) -> None:
        """Adds the line that stores the tile called `name` for a block of samples."""
        own = self.tile.width or 0
        column, shape = source.before.columns(own), f"[BLOCK, {columns(own)}]"
        here = f"((first + tl.arange(0, BLOCK)).to(tl.int64) * {self.width})[:, None]"
        pointer = f"stored{self.number}"
        place = f"{pointer} + {here} + ({self.first} + {column})[None, :]"
        checks = [f"{mask}[:, None]"] if mask else []
        checks += [f"({column}[None, :] < {own})"] if columns(own) != own else []
        inside = f", mask={' & '.join(checks)}" if checks else ""
        value = f"tl.broadcast_to({name}, {shape}).to({pointer}.dtype.element_ty)"
        source.line(f"tl.store({place}, {value}{inside})")


def row_tile_stores(rows: Sequence[tuple[int, StoredRow]]) -> list[RowTileStore]:
    """Returns the stores of all tiles of numbered rows."""
    stores = []
    for number, row in rows:
        width, first = _width(row), 0
        for tile in row:
            stores.append(RowTileStore(tile, number, first, width))
            first += tile.width or 0
    return stores


def stored_names(rows: Sequence[StoredRow]) -> list[str]:
    """Returns the names of the pointers to stored rows."""
    return [f"stored{n}" for n in range(len(rows))]


def stored_arrays(rows: Sequence[StoredRow], num_rows: int, numerics: Numerics) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays of stored rows, in the type that products take."""
    dtype = jnp.dtype(jnp.bfloat16 if numerics == "bfloat16" else jnp.float32)
    return [jax.ShapeDtypeStruct((num_rows, _width(row)), dtype) for row in rows]


def _width(row: StoredRow) -> int:
    return sum(tile.width or 0 for tile in row)
