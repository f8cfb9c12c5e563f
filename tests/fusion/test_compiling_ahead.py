"""Kernels are compiled in processes side by side, whose results the caller takes over."""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rollmill.core.process_tree import descendants_of
from rollmill.fusion.backends.triton import compile, parallel_compile as ahead
from rollmill.fusion.backends.triton.compile import Kernel, compilation_of, compile_for
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
def compiled_here(tmp_path, monkeypatch):
    """Names of the kernels that this process compiles."""
    names = []
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
    by_triton = compile.compile_file

    def compile_file(compilation):
        names.append(Path(compilation.file).stem)
        return by_triton(compilation)

    monkeypatch.setattr(compile, "compile_file", compile_file)
    return names


def compile_all(kernels):
    with ahead.KernelCompilers().compiling([compilation_of(each, [STRUCT], 90) for each in kernels]) as wait:
        for number in range(len(kernels)):
            wait(number)


def name_of(kernel):
    return Path(compilation_of(kernel, [STRUCT], 90).file).stem


def test_what_was_compiled_ahead_is_not_compiled_here(compiled_here):
    kernels = [kernel(f"tl.load(x + place) * {factor}") for factor in (2.0, 3.0, 5.0)]
    compile_all(kernels)
    codes = [compile._code(each, [STRUCT], 90) for each in kernels]
    assert not compiled_here
    later = kernel("tl.load(x + place) * 7.0")
    assert ".target sm_90" in compile._code(later, [STRUCT], 90).ptx
    assert compiled_here == [name_of(later)]
    # the same code as by a compilation in this process
    assert codes == [compile.code_of(compile_for(each, [STRUCT], 90)) for each in kernels]


def test_an_error_is_raised_where_the_kernel_is_needed_and_stops_no_other(compiled_here):
    wrong, right = kernel("not_there(x)"), kernel("tl.load(x + place) * 11.0")
    compile_all([wrong, right])
    with raises("triton-cannot-compile-kernel"):
        compile._code(wrong, [STRUCT], 90)
    compile._code(right, [STRUCT], 90)
    assert compiled_here == [name_of(wrong)]


def test_searches_share_processes_that_end_with_the_last(compiled_here):
    compilers = ahead.KernelCompilers()
    first, second = (compilation_of(kernel(f"tl.load(x + place) * {n}"), [STRUCT], 90) for n in (19.0, 23.0))
    with compilers.running() as process:
        for each in (first, second):
            with compilers.compiling([each]) as wait:
                wait(0)
        family = [pid for pid, _ in descendants_of(process._process.pid)]
        assert len(family) == 3  # the process and two copies
    deadline = time.monotonic() + 5
    while any(map(is_running, family)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_process_leaves_the_kernels_to_this_process(compiled_here):
    wanted = kernel("tl.load(x + place) * 29.0")
    compilers = ahead.KernelCompilers()
    with compilers.running() as process:
        os.kill(process._process.pid, signal.SIGKILL)
        with compilers.compiling([compilation_of(wanted, [STRUCT], 90)] * 2) as wait:
            wait(1)
    assert compile._code(wanted, [STRUCT], 90).ptx
    assert compiled_here == [name_of(wanted)]


def test_without_an_interpreter_kernels_are_compiled_here(compiled_here, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/not/there")
    wanted = kernel("tl.load(x + place) * 13.0")
    compile_all([wanted] * 2)
    compile._code(wanted, [STRUCT], 90)
    assert compiled_here == [name_of(wanted)]


def test_processes_end_where_the_work_is_interrupted(compiled_here, monkeypatch):
    started, begin = [], ahead.start_python

    def note(*arguments, **named):
        started.append(begin(*arguments, **named))
        return started[0]

    monkeypatch.setattr(ahead, "start_python", note)
    compilations = [compilation_of(kernel("tl.load(x + place) * 17.0"), [STRUCT], 90)] * 2
    with pytest.raises(KeyboardInterrupt), ahead.KernelCompilers().compiling(compilations):
        raise KeyboardInterrupt
    assert started[0].returncode == -9
