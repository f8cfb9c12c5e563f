"""Random matrices with orthonormal rows or columns, computed by matrix products.

The initialiser in JAX uses a QR decomposition of a linear-algebra library, which takes additional memory on some
devices.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rollmill.core.types import Key

PANEL = 128
"""Number of columns that one matrix product makes orthogonal to all columns before them."""
_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def orthogonal(key: Key, shape: tuple[int, ...], gain: float) -> Float[Array, "..."]:
    """Returns a random matrix with orthonormal rows or columns (the fewer), times `gain` (Saxe et al. 2013).

    All axes but the last are treated as rows. The result equals `jax.nn.initializers.orthogonal` up to rounding.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    longer, shorter = max(rows, columns), min(rows, columns)
    basis = orthonormal_columns(jax.random.normal(key, (longer, shorter), jnp.float32))
    return (gain * (basis if rows >= columns else basis.T)).reshape(shape)


def orthonormal_columns(matrix: Float[Array, "N M"]) -> Float[Array, "N M"]:
    """Returns the factor Q of `matrix = Q R` with a positive diagonal of R, for a matrix of full rank with N >= M.

    Uses the modified Gram-Schmidt process, in panels of columns if there are many. Every projection is done twice:
    one projection leaves an error that grows with the condition number of the matrix, and the second removes it
    (Giraud et al. 2005).
    """
    rows, columns = matrix.shape
    if columns == 0:
        return matrix
    if columns <= PANEL:
        return _orthonormal_panel(matrix)
    count = -(-columns // PANEL)
    padded = jnp.pad(matrix, ((0, 0), (0, count * PANEL - columns)))

    def project(turn: Int[Array, ""], basis: Float[Array, "N P"]) -> Float[Array, "N P"]:
        first = turn // 2 * PANEL
        done = jnp.where(jnp.arange(count * PANEL)[None] < first, basis, 0.0)
        panel = jax.lax.dynamic_slice_in_dim(basis, first, PANEL, axis=1)
        panel = _orthonormal_panel(panel - _product(done, _product(done.T, panel)))
        return jax.lax.dynamic_update_slice_in_dim(basis, panel, first, axis=1)

    return jax.lax.fori_loop(0, 2 * count, project, padded)[:, :columns]


def _orthonormal_panel(panel: Float[Array, "N W"]) -> Float[Array, "N W"]:
    """Orthonormalises a panel of columns. Columns of zeros, which pad the last panel, do not change."""
    return jax.lax.fori_loop(0, 2 * panel.shape[1], _project_column, panel)


def _project_column(turn: Int[Array, ""], panel: Float[Array, "N W"]) -> Float[Array, "N W"]:
    """Normalises a column and projects those after it. One function, so that JAX traces it once for each shape."""
    width = panel.shape[1]
    number, index = jnp.arange(width, dtype=jnp.int32)[None], jax.lax.rem(turn, jnp.int32(width))
    column = jax.lax.dynamic_slice_in_dim(panel, index, 1, axis=1)
    square = jnp.sum(jnp.square(column))
    column = column * jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
    without = panel - column * jnp.sum(panel * column, axis=0, keepdims=True)
    return jnp.where(number > index, without, jnp.where(number == index, column, panel))
