"""Kernels are compiled in processes side by side, and found in Triton's cache when they are called."""

import sys

import jax
import jax.numpy as jnp
import pytest

from rollmill.fusion.backends.triton import parallel_compile as ahead
from rollmill.fusion.backends.triton.compile import Kernel, compilation_of, compiled
from wordings import raises

pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")

STRUCT = jax.ShapeDtypeStruct((64,), jnp.dtype(jnp.float32))


def kernel(expression):
    lines = [
        "@triton.jit",
        "def kernel(x, y, N: tl.constexpr):",
        "    place = tl.arange(0, N)",
        f"    tl.store(y + place, {expression})",
    ]
    return Kernel("\n".join(lines) + "\n", 1, (STRUCT,), {"N": 64}, 1)


@pytest.fixture
def hits(tmp_path, monkeypatch):
    """Whether each kernel that is compiled here was in the cache."""
    from triton import knobs

    found = []
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **fields: found.append(fields["cache_hit"]))
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
    return found


def compile_all(kernels):
    with ahead.compiling_side_by_side([compilation_of(each, [STRUCT], 90) for each in kernels]) as wait:
        wait()


def test_what_was_compiled_ahead_is_found(hits):
    kernels = [kernel(f"tl.load(x + place) * {factor}") for factor in (2.0, 3.0, 5.0)]
    compile_all(kernels)
    for each in kernels:
        assert ".target sm_90" in compiled(each, [STRUCT], 90).asm["ptx"]
    compiled(kernel("tl.load(x + place) * 7.0"), [STRUCT], 90)
    assert hits == [True, True, True, False]


def test_an_error_is_raised_where_the_kernel_is_needed_and_stops_no_other(hits):
    wrong, right = kernel("not_there(x)"), kernel("tl.load(x + place) * 11.0")
    compile_all([wrong, right])
    with raises("triton-cannot-compile-kernel"):
        compiled(wrong, [STRUCT], 90)
    compiled(right, [STRUCT], 90)
    assert hits == [True]


def test_without_an_interpreter_kernels_are_compiled_here(hits, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/not/there")
    compile_all([kernel("tl.load(x + place) * 13.0")] * 2)
    compiled(kernel("tl.load(x + place) * 13.0"), [STRUCT], 90)
    assert hits == [False]


def test_processes_end_where_the_work_is_interrupted(hits, monkeypatch):
    started, begin = [], ahead.start_python

    def then_interrupted(*arguments, **named):
        if started:
            raise KeyboardInterrupt
        started.append(begin(*arguments, **named))
        return started[0]

    monkeypatch.setattr(ahead, "start_python", then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_all([kernel("tl.load(x + place) * 17.0")] * 2)
    assert started[0].returncode == -9
