"""Keeps the source of kernels in files, as Triton needs it, and calls or compiles them."""

import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from rollmill.fusion.triton_operations import HELPERS

HEADER = f"""\
import triton
import triton.language as tl
from triton.language.extra import libdevice


{HELPERS}
"""


class Kernel(NamedTuple):
    """A kernel's source, and how it is launched."""

    source: str
    """The function `kernel`, decorated, without imports."""
    programs: int
    """Of the grid."""
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    """What the last pointers are for."""
    constants: dict[str, Any]
    """Arguments known at compile time."""
    num_warps: int
    num_stages: int = 1


def call(kernel: Kernel, arrays: Sequence[Array]) -> list[Array]:
    """Launches a kernel in the program that is being traced; returns its outputs."""
    import jax_triton

    return jax_triton.triton_call(
        *arrays,
        kernel=_module(kernel.source).kernel,
        out_shape=list(kernel.outputs),
        grid=(kernel.programs,),
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        enable_fp_fusion=True,
        **kernel.constants,
    )


def compiled(kernel: Kernel, arrays: Sequence[jax.ShapeDtypeStruct], capability: int) -> Any:
    """Compiles a kernel for NVIDIA's compute capability, 90 for 9.0; no GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = _module(kernel.source).kernel
    pointers = [f"*{_TYPES[array.dtype.name]}" for array in (*arrays, *kernel.outputs)]
    signature = dict(zip(function.arg_names, pointers, strict=False)) | dict.fromkeys(
        kernel.constants, "constexpr"
    )
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers))}
    source = triton.compiler.ASTSource(function, signature, kernel.constants, attributes)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}


def cache_folder() -> Path:
    """Where kernels are kept, and what was found out about them: in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rollmill")


@functools.lru_cache(maxsize=256)
def _module(source: str) -> ModuleType:
    """The module of a kernel; its file is written first, whole or not at all."""
    text = HEADER + "\n" + source
    name = "kernel_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    file = cache_folder() / "kernels" / f"{name}.py"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
