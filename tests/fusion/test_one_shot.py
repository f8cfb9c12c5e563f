"""The one-shot mean's kernel, compiled for a GPU where there is none, and the memory that it is laid out for."""

import jax
import jax.numpy as jnp
import pytest

from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.one_shot import (
    FLAG_BYTES,
    LANE,
    LANE_BYTES,
    MAX_RANKS,
    mean_kernel,
    num_lanes,
)

pytest.importorskip("triton")


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (9155, 4), (1024, 8)])
def test_the_kernel_compiles_for_a_gpu(size, ranks):
    kernel = mean_kernel(size, ranks, first_lane=3)
    assert kernel.programs == num_lanes(size) == -(-size // LANE)
    arrays = [jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((2 * ranks + 1,), jnp.uint32)]
    code = compile_for(kernel, arrays, 90).asm["ptx"]
    assert code.count("atom.global.sys.release.exch") == ranks  # a flag in the memory of each
    assert code.count("ld.global.sys.acquire") >= ranks  # those of all
    assert code.count("ld.volatile.global") >= ranks  # what others have written is in no cache


def test_flags_of_all_ranks_fit_beside_the_number_of_the_exchange():
    assert 4 * (1 + MAX_RANKS) <= FLAG_BYTES and LANE_BYTES % 128 == 0
