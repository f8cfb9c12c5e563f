"""Compiles the Triton kernel in a file. Run as a script, it compiles the kernels described on standard input.

It imports neither Rollmill nor JAX, so the script begins to compile after a second or two.
"""

import contextlib
import ctypes
import functools
import importlib.util
import json
import multiprocessing
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1  # as in core/process_tree.py, which this script cannot import
_printing = threading.Lock()


class Compilation(NamedTuple):
    """Everything that determines a compiled kernel, except the versions of the compilers."""

    file: str
    """Path of a Python file that defines the function `kernel`."""
    pointers: tuple[tuple[str, int], ...]
    """Types of the pointer arguments, each with its alignment in bytes, or 0 if unknown."""
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    """Options of the Triton compiler."""
    capability: int
    """Compute capability of the GPU, such as 90 for 9.0."""

    @classmethod
    def from_fields(cls, fields: Any) -> "Compilation":
        """Returns the compilation that was written as JSON."""
        file, pointers, constants, options, capability = fields
        pairs = lambda items: tuple(tuple(item) for item in items)
        return cls(file, pairs(pointers), pairs(constants), pairs(options), capability)


def compile_file(compilation: Compilation) -> Any:
    """Compiles a kernel, and returns it. Triton also stores it in its cache."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = _module(compilation.file).kernel
    names = [name for name, _ in compilation.constants]
    types = [type_ for type_, _ in compilation.pointers]
    signature = dict(zip(function.arg_names, types, strict=False)) | dict.fromkeys(names, "constexpr")
    alignments = enumerate(bytes_ for _, bytes_ in compilation.pointers)
    attributes = {(place,): [["tt.divisibility", bytes_]] for place, bytes_ in alignments if bytes_}
    task = triton.compiler.ASTSource(function, signature, dict(compilation.constants), attributes)
    target = GPUTarget("cuda", compilation.capability, 32)
    return triton.compile(task, target=target, options=dict(compilation.options))


@functools.lru_cache(maxsize=256)
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelCode(NamedTuple):
    """A compiled kernel, as jaxlib launches it."""

    name: str
    shared_bytes: int
    """Shared memory of a block, in bytes."""
    ptx: str
    ttir: str
    """Triton's intermediate code."""


def code_of(built: Any) -> KernelCode:
    """Returns the code of a kernel that Triton has compiled."""
    return KernelCode(built.metadata.name, built.metadata.shared, built.asm["ptx"], str(built.asm["ttir"]))


def main() -> None:
    """Compiles the kernel of each line `[number, compilation]` of standard input, several at the same time.

    The only argument is the number of processes, which are copies of this process and do not import Triton again.
    Prints `[number, code]` when a kernel is compiled, or `[number, null]` after an error, which the caller raises
    when it compiles the kernel itself.
    """
    with contextlib.suppress(ImportError):
        import triton.compiler

        assert triton.compiler is not None
    copies = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(int(sys.argv[1]), mp_context=copies, initializer=_end_with_parent) as pool:
        for line in sys.stdin:
            number, fields = json.loads(line)
            pool.submit(_compile, fields).add_done_callback(functools.partial(_print, number))


def _end_with_parent() -> None:
    """Lets the system kill this copy if the original process is killed. It would wait for work forever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _compile(fields: Any) -> KernelCode:
    return code_of(compile_file(Compilation.from_fields(fields)))


def _print(number: int, future: "Future[KernelCode]") -> None:
    code = None if future.cancelled() or future.exception() else future.result()
    with _printing:
        print(json.dumps([number, code]), flush=True)


if __name__ == "__main__":
    main()
