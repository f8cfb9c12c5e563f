"""Compiles the Triton kernel in a file. Run as a script, it compiles the kernels described on standard input.

It imports neither Rollmill nor JAX, so the processes that compile kernels start in a second or two.
"""

import contextlib
import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


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
    def from_json(cls, text: str) -> "Compilation":
        """Parses a compilation from a JSON list of its fields."""
        file, pointers, constants, options, capability = json.loads(text)
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


def main() -> None:
    """Compiles a kernel for each line of standard input. Errors are ignored, because calling the kernel raises
    them again.
    """
    for line in sys.stdin:
        with contextlib.suppress(Exception):
            compile_file(Compilation.from_json(line))


if __name__ == "__main__":
    main()
