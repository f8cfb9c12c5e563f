"""Measures the limits of this machine for rooflines (Williams et al., "Roofline", CACM 2009)."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rollmill.profiling.results import Ceilings

SIZES = {"cpu": (1024, 2**25), "gpu": (8192, 2**29)}
"""Width of the square matrices to multiply, and number of floats to add, by platform."""
REPEATS = 5


def measure_ceilings() -> Ceilings:
    """Measures a device's peak rates: the fastest of several float32 matrix products and vector additions.

    Products use XLA's default precision, which is tf32 on NVIDIA GPUs.
    """
    width, length = SIZES.get(jax.default_backend(), SIZES["cpu"])
    matrix, vector = jnp.ones((width, width), jnp.float32), jnp.ones(length, jnp.float32)
    product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
    # Into the memory of the first vector: new memory would be measured with what the system needs to provide it.
    total = jax.jit(jnp.add, donate_argnums=0).lower(vector, vector).compile()
    sums = jnp.zeros(length, jnp.float32)

    def add() -> None:
        nonlocal sums
        sums = total(sums, vector).block_until_ready()

    multiply = _fastest(lambda: product(matrix, matrix).block_until_ready())
    return Ceilings(2.0 * width**3 / multiply, 3 * 4.0 * length / _fastest(add))


def _fastest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
