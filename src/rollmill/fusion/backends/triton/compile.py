"""Compiles Triton kernels and calls them from JAX. Triton requires their source to be in files."""

import functools
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.errors import CannotFuse, CheckpointError
from rollmill.core.installation import cache_root
from rollmill.core.operations import GRADIENTS_KERNEL
from rollmill.fusion.backends.triton import memory, operations
from rollmill.fusion.backends.triton.compile_file import Compilation, KernelCode, code_of, compile_file
from rollmill.fusion.cache import write_exactly

HEADER = f"""\
import triton
import triton.language as tl
from triton.language.extra import libdevice


{operations.HELPERS}

{memory.HELPERS}
"""


def entry(name: str) -> str:
    """Returns the line that ends a kernel's source, and selects the function to compile.

    Profilers show the kernel under the name of this function.
    """
    return f"kernel = {name}\n"


class Kernel(NamedTuple):
    """The source of a Triton kernel, and how to launch it."""

    source: str
    """A decorated Triton function, without imports, followed by an assignment of it to the name `kernel`."""
    programs: int
    """Number of programs along the first axis of the grid."""
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and dtypes of the outputs, whose pointers follow all other arguments of the kernel."""
    constants: dict[str, Any]
    """Compile-time arguments of the kernel, by name."""
    num_warps: int
    uniforms: int = 0
    """Number of uniform arrays at the end of the inputs. XLA may pass slices of larger buffers for them, so their
    alignment is unknown."""
    num_stages: int = 1
    registers: int = 0
    """Maximum number of registers per thread. 0 lets the compiler decide."""
    lanes: int = 1
    """Number of runs that the kernel computes at once, along the second axis of the grid."""
    aliases: Mapping[int, int] = {}
    """Maps inputs that are updated in place to the outputs that they become, by index."""


def call_in_lanes(kernel: Kernel, arrays: Sequence[Array]) -> list[Array]:
    """Calls a Triton kernel inside `jax.vmap`, with one launch for all lanes."""

    @jax.custom_batching.custom_vmap
    def launch(*arrays: Array) -> list[Array]:
        return call(kernel, arrays)

    @launch.def_vmap
    def _(lanes: int, batched: Sequence[bool], *arrays: Any) -> tuple[list[Array], list[bool]]:
        own = [
            jnp.broadcast_to(array, (lanes, *array.shape)) if n in kernel.aliases and not batched[n] else array
            for n, array in enumerate(arrays)
        ]
        differ = [is_batched or n in kernel.aliases for n, is_batched in enumerate(batched)]
        widened = in_lanes(kernel, [array.shape for array in own], differ, lanes)
        return call(widened, own), [True] * len(kernel.outputs)

    return launch(*arrays)


def in_lanes(kernel: Kernel, shapes: Sequence[tuple[int, ...]], batched: Sequence[bool], lanes: int) -> Kernel:
    """Returns a kernel that computes several lanes of a `jax.vmap` in one launch, with the same results as one
    launch per lane.

    Args:
        kernel: the kernel for a single lane.
        shapes: shapes of its inputs. Inputs that differ between lanes have a leading axis `lanes`.
        batched: for each input, whether it differs between lanes.
        lanes: number of lanes.
    """
    sizes = [math.prod(shape[1:]) if own else 0 for shape, own in zip(shapes, batched, strict=True)]
    sizes += [math.prod(output.shape) for output in kernel.outputs]
    outputs = tuple(jax.ShapeDtypeStruct((lanes, *output.shape), output.dtype) for output in kernel.outputs)
    return kernel._replace(source=_lane_source(kernel, sizes), outputs=outputs, lanes=lanes)


def _lane_source(kernel: Kernel, sizes: Sequence[int]) -> str:
    """Returns the source of a kernel that moves each pointer to its lane, and then runs the original code.

    It has the kernel's name, by which profilers know it.
    """
    name = kernel.source.rstrip().rsplit(" ", 1)[-1]  # a source ends with `entry(name)`
    pointers = [f"p{n}" for n in range(len(sizes))]
    moved = [f"p{n} + lane * {size}" if size else f"p{n}" for n, size in enumerate(sizes)]
    constants = [f"{name}: tl.constexpr" for name in kernel.constants]
    handed = [f"{name}={name}" for name in kernel.constants]
    lines = [
        "one_lane = kernel",
        "",
        "@triton.jit",
        f"def {name}({', '.join([*pointers, *constants])}):",
        "    lane = tl.program_id(1).to(tl.int64)",
        f"    one_lane({', '.join([*moved, *handed])})",
        "",
    ]
    return "\n".join([kernel.source, *lines, entry(name)])


def call(kernel: Kernel, arrays: Sequence[Any]) -> list[Array]:
    """Calls a Triton kernel from traced JAX code, and returns its outputs.

    The launch is a typed XLA custom call, so XLA combines consecutive launches into one CUDA graph.
    """
    from jaxlib import gpu_triton

    capability = capability_here()
    built = _code(kernel, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays], capability)
    _check_shared_memory(built.name, built.shared_bytes, capability)
    code = gpu_triton.TritonKernel(
        built.name, kernel.num_warps, 1, built.shared_bytes, built.ptx, built.ttir, capability
    )
    pointers = [gpu_triton.create_array_parameter(0, bytes_) for bytes_ in _alignments(kernel, len(arrays))]
    launch = gpu_triton.TritonKernelCall(code, kernel.programs, kernel.lanes, 1, pointers)
    # The handler of jaxlib expects a compressed protocol buffer.
    opaque = zlib.compress(launch.to_proto(built.name, b""))
    call_it = jax.ffi.ffi_call(
        "triton_kernel_call_ffi", list(kernel.outputs), input_output_aliases=dict(kernel.aliases) or None
    )
    return list(call_it(*arrays, opaque=opaque))


def _check_shared_memory(name: str, needed: int, capability: int) -> None:
    """Raises `CannotFuse` if a block of a kernel exceeds the chip, before CUDA rejects the launch."""
    room = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    if needed > room:
        raise CannotFuse(
            f"a block of the kernel {name} needs {needed:,} bytes of shared memory, but the GPU has {room:,}",
            advice="use a smaller network, or fusion=rollout"
            if name == GRADIENTS_KERNEL
            else "use a smaller network",
        )


def remember(compilation: Compilation, code: KernelCode) -> None:
    """Keeps the code of a kernel that another process has compiled for this process."""
    while len(_compiled_elsewhere) >= MAX_REMEMBERED:
        del _compiled_elsewhere[next(iter(_compiled_elsewhere))]
    _compiled_elsewhere[compilation] = code


def _code(kernel: Kernel, arrays: Sequence[jax.ShapeDtypeStruct], capability: int) -> KernelCode:
    compilation = compilation_of(kernel, arrays, capability)
    return _compiled_elsewhere.get(compilation) or code_of(_compile(compilation))


def compile_for(kernel: Kernel, arrays: Sequence[jax.ShapeDtypeStruct], capability: int) -> Any:
    """Compiles a kernel for GPUs of a compute capability, such as 90 for 9.0. No GPU is needed."""
    return _compile(compilation_of(kernel, arrays, capability))


def capability_here() -> int:
    """Returns the compute capability of this machine's first GPU, such as 90 for 9.0."""
    from jaxlib import gpu_triton

    return gpu_triton.get_compute_capability(0)


def compilation_of(kernel: Kernel, arrays: Sequence[Any], capability: int) -> Compilation:
    """Writes a kernel's source to a file, and returns everything that determines the compiled kernel.

    `arrays` are the kernel's inputs or their shapes. `capability` is the GPU's compute capability, such as 90 for
    9.0.
    """
    types = [f"*{_TYPES[array.dtype.name]}" for array in (*arrays, *kernel.outputs)]
    pointers = tuple(zip(types, _alignments(kernel, len(arrays)), strict=True))
    file = _source_file(kernel.source)
    return Compilation(str(file), pointers, tuple(kernel.constants.items()), _options(kernel), capability)


def _options(kernel: Kernel) -> tuple[tuple[str, Any], ...]:
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    return tuple((options | ({"maxnreg": kernel.registers} if kernel.registers else {})).items())


@functools.lru_cache(maxsize=256)
def _compile(compilation: Compilation) -> Any:
    from triton.errors import TritonError

    try:
        return compile_file(compilation)
    except (TritonError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise CannotFuse(f"Triton cannot compile the kernel: {reason[0]}") from error


def _alignments(kernel: Kernel, num_arrays: int) -> list[int]:
    """Returns each pointer's alignment in bytes, or 0 if unknown."""
    own = num_arrays - kernel.uniforms
    return [ALIGNED] * own + [0] * kernel.uniforms + [ALIGNED] * len(kernel.outputs)


SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that a block may use, by compute capability, as listed in the CUDA programming guide."""

MAX_REMEMBERED = 256
"""Maximum number of kernels from other processes that are kept."""

_compiled_elsewhere: dict[Compilation, KernelCode] = {}

ALIGNED = 16
"""Minimum alignment of XLA buffers in bytes."""

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


def _source_file(source: str) -> Path:
    """Returns the file of a kernel's module, written whole or not at all."""
    text = HEADER + "\n" + source
    name = "kernel_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    file = cache_root() / "kernels" / f"{name}.py"
    try:
        write_exactly(file, text)
    except (OSError, CheckpointError) as error:
        advice = "set ROLLMILL_CACHE_DIR to another folder"
        raise CannotFuse(f"{file} cannot be written: {error}.", advice=advice) from error
    return file
