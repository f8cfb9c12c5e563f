"""Compiles the kernel in a file. As a program, it compiles the files named on its input.

It imports neither Rollmill nor JAX, so processes that only compile start in a second or two.
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
    """All that a compiled kernel depends on, besides versions."""

    file: str
    """A file of Python source, with the function `kernel`."""
    pointers: tuple[tuple[str, int], ...]
    """Types of its pointers, and their alignments in bytes, 0 if unknown."""
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    """Triton's."""
    capability: int
    """Compute capability of NVIDIA's chip, 90 for 9.0."""

    @classmethod
    def from_json(cls, text: str) -> "Compilation":
        """Returns the compilation whose fields are a JSON list."""
        file, pointers, constants, options, capability = json.loads(text)
        pairs = lambda items: tuple(tuple(item) for item in items)
        return cls(file, pairs(pointers), pairs(constants), pairs(options), capability)


def compile_file(compilation: Compilation) -> Any:
    """Returns the compiled kernel, which Triton also keeps in its cache."""
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
    """Compiles a kernel for each line of input. Errors are ignored, since the kernel's call raises them again."""
    for line in sys.stdin:
        with contextlib.suppress(Exception):
            compile_file(Compilation.from_json(line))


if __name__ == "__main__":
    main()
