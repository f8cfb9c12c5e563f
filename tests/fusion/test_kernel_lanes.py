"""Kernels of several trainings: each lane reads and writes its own part of every array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.fusion.backends.triton import compile as compiling
from rollmill.fusion.backends.triton.compile import Kernel, call_in_lanes, compile_for, entry, in_lanes
from wordings import raises

LINES = """\
@triton.jit
def scaled(values, factor, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(values + place) * tl.load(factor))

"""
SCALED = Kernel(LINES + entry("scaled"), 1, (jax.ShapeDtypeStruct((16,), jnp.dtype("float32")),), {"N": 16}, 1)


@pytest.fixture
def triton(tmp_path, monkeypatch):
    """Compiles in a folder of this test."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("batched", [(True, True), (True, False)])
def test_a_kernel_in_lanes_compiles_without_a_gpu(batched):
    shapes = [(3, 16) if batched[0] else (16,), (3,) if batched[1] else ()]
    kernel = in_lanes(SCALED, shapes, batched, 3)
    assert (kernel.lanes, kernel.programs, kernel.outputs[0].shape) == (3, 1, (3, 16))
    built = compile_for(kernel, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], 90)
    assert built.metadata.name == "scaled" and "%ctaid.y" in built.asm["ptx"]


def test_a_block_that_does_not_fit_the_chip_is_refused():
    compiling._check_shared_memory("scaled", 232_448, 90)
    with raises("block-kernel-needs-bytes-shared", "rollmill_gradients", "288,768", "232,448"):
        compiling._check_shared_memory("rollmill_gradients", 288_768, 90)
    with raises("block-kernel-needs-bytes-shared", "101,376"):
        compiling._check_shared_memory("scaled", 110_000, 999)


def test_pointers_move_by_the_size_of_what_differs():
    source = in_lanes(SCALED, [(3, 16), ()], (True, False), 3).source
    assert "one_lane(p0 + lane * 16, p1, p2 + lane * 16, N=N)" in source
    assert source.endswith(entry("scaled"))


def test_vmap_launches_one_kernel_for_all(monkeypatch):
    launched = []

    def by_numpy(kernel, arrays):
        launched.append(kernel)
        values, factor = arrays
        return [values * factor]

    monkeypatch.setattr(compiling, "call", by_numpy)
    values = jnp.arange(48, dtype=jnp.float32).reshape(3, 16)
    found = jax.vmap(lambda each: call_in_lanes(SCALED, [each, jnp.float32(2)])[0])(values)
    np.testing.assert_array_equal(found, 2 * values)
    assert launched[-1].lanes == 3


def test_a_loop_inside_of_vmap_launches_one_kernel_for_all(monkeypatch):
    launched = []
    monkeypatch.setattr(compiling, "call", lambda kernel, arrays: launched.append(kernel) or [arrays[0] + 1])

    def twice(values):
        again = lambda values, _: (call_in_lanes(SCALED, [values, jnp.float32(2)])[0], None)
        return jax.lax.scan(again, values, None, length=2)[0]

    values = jnp.zeros((3, 16))
    np.testing.assert_array_equal(jax.jit(jax.vmap(twice))(values), values + 2)
    assert {kernel.lanes for kernel in launched} >= {3}
