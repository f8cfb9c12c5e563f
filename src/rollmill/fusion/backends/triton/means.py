"""A kernel that computes means over samples from the partial sums of a gradient kernel.

Each program adds up some columns of the partial sums, always in the same order, with all loads in flight at once.

Shape letters: `P` programs of the gradient kernel, `S` sums per program.
"""

import jax
from jaxtyping import Array, Float

from rollmill.core.operations import MEANS_KERNEL
from rollmill.fusion.backends.triton.compile import Kernel, call, call_in_lanes, entry

ROWS, COLUMNS, NUM_WARPS = 64, 32, 8
"""Rows and columns of the sums that a program reads at once."""

SOURCE = f"""
@triton.jit
def {MEANS_KERNEL}(
    sums, means,
    P: tl.constexpr, S: tl.constexpr, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < P) & (column[None, :] < S)
        total += tl.load(sums + row[:, None] * S + column[None, :], mask=inside, other=0.0)
    mean = tl.div_rn(tl.sum(total, axis=0), tl.full([COLUMNS], SAMPLES, tl.float32))
    tl.store(means + column, mean, mask=column < S)

{entry(MEANS_KERNEL)}"""


def means_by_kernel(sums: Float[Array, "P S"], num_samples: int, *, lanes: int = 1) -> Float[Array, " S"]:
    """Returns the sum over all programs divided by the number of samples, for `lanes` lanes of a `jax.vmap`."""
    (means,) = (call if lanes == 1 else call_in_lanes)(means_kernel(sums.shape, num_samples), [sums])
    return means


def means_kernel(shape: tuple[int, ...], num_samples: int) -> Kernel:
    """Returns the kernel that adds up partial sums `[P, S]` and divides the totals by `num_samples`."""
    programs, size = shape
    constants = {"P": programs, "S": size, "SAMPLES": float(num_samples), "ROWS": ROWS, "COLUMNS": COLUMNS}
    means = jax.ShapeDtypeStruct((size,), "float32")
    return Kernel(SOURCE, -(-size // COLUMNS), (means,), constants, NUM_WARPS)
