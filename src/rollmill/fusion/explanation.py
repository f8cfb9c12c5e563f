"""Explains whether policy and environment fuse, which resources their kernel needs, and how fast it could be at
best.
"""

import re
import struct
import tempfile
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollmill.core.child_processes import run_program
from rollmill.core.machine import Numerics
from rollmill.dataflow import Graph, init_state
from rollmill.fusion.backends.triton.compile import Kernel, compile_for
from rollmill.fusion.backends.triton.launches import compile_seconds_on_gpu
from rollmill.fusion.backends.triton.rollout import Launch, rollout_kernel
from rollmill.fusion.estimate.chips import Chip
from rollmill.fusion.estimate.cost import Costs, bytes_of, costs_of
from rollmill.fusion.estimate.pressure import Pressure
from rollmill.fusion.ir import program_text
from rollmill.fusion.kernels.leaves import to_raw
from rollmill.fusion.kernels.rollout import RolloutStep, estimate_step_pressure, lower_rollout
from rollmill.fusion.lower.function import LoweredFunction
from rollmill.fusion.opt.passes import PASSES

WARP = 32
REGISTERS = 65536
"""Number of 32-bit registers of a multiprocessor."""


class KernelResources(NamedTuple):
    """Resources that a compiled kernel uses."""

    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Bytes per thread that did not fit in registers."""
    shared_bytes: int
    """Bytes of shared memory per program."""
    code_bytes: int
    """Size of the machine code in bytes."""


class Explanation(NamedTuple):
    """Description of a rollout kernel, derived without compiling or running it."""

    pressure: Pressure
    """Estimated register pressure and size of a step's program."""
    state_bytes: int
    """Bytes per environment that are carried from step to step."""
    written_bytes: int
    """Bytes per environment that each step writes to the trajectory."""
    costs: Costs
    bounds: dict[str, float]
    """Upper bounds on environment steps per second, by the resource that limits them."""
    launch: Launch
    kernel: Kernel
    arrays: list[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the arrays that the kernel takes."""

    @property
    def compile_seconds(self) -> float:
        """Approximate seconds that the kernel of a long step takes to compile, or 0 for other steps."""
        return compile_seconds_on_gpu(self.pressure)


def explain(graph: Graph, chip: Chip, numerics: Numerics, launch: Launch | None = None) -> Explanation:
    """Describes the rollout kernel of a graph on a GPU, without compiling it. No GPU is needed.

    Raises:
        CannotFuse: policy and environment cannot be fused. The message gives the reason and the source line.
    """
    launch, num_envs = launch or Launch(), graph.loops.num_envs
    state = jax.eval_shape(
        partial(init_state, graph), jax.random.key(0), jax.ShapeDtypeStruct((num_envs,), jnp.int32)
    )
    step, keys = lower_rollout(graph), jax.ShapeDtypeStruct((num_envs, 2), jnp.uint32)
    task = step, step.prologue.shapes, to_raw(state.collector), keys, graph.loops.num_steps
    kernel, arrays = rollout_kernel(*task, launch=launch, numerics=numerics)
    costs = costs_of(step.program)
    written = bytes_of([(leaf.shape, leaf.dtype) for leaf in step.step_leaves if leaf.places])
    return Explanation(
        pressure=estimate_step_pressure(step),
        state_bytes=_state_of(step),
        written_bytes=written,
        costs=costs,
        bounds=chip.bounds(costs.always, written, numerics),
        launch=launch,
        kernel=kernel,
        arrays=arrays,
    )


def envs_per_multiprocessor(resources: KernelResources, launch: Launch) -> int:
    """Returns how many environments a multiprocessor can run at once, as limited by its registers."""
    return REGISTERS // (resources.registers * launch.num_warps * WARP) * launch.block


def compiled_resources(explanation: Explanation, chip: Chip) -> KernelResources | None:
    """Compiles the kernel of an explanation for a GPU, and returns the resources it uses, or None without Triton.

    A kernel of 18,000 operations takes half a minute on one core.
    """
    try:
        from triton import knobs
    except ImportError:
        return None
    binary = compile_for(explanation.kernel, explanation.arrays, chip.compute_capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        # The loader would report the same, but only on a GPU of this kind.
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = run_program(*command, capture_output=True, text=True, check=True).stdout
    number = lambda name: int(re.findall(rf"{name}:(\d+)", usage)[-1])
    code = _section_size(binary.asm["cubin"], f".text.{binary.metadata.name}")
    return KernelResources(number("REG"), number("STACK"), binary.metadata.shared, code)


class CompilerStage(NamedTuple):
    """A program in printed form after one of the compiler's stages."""

    name: str
    text: str


def compiler_stages(lowered: LoweredFunction) -> list[CompilerStage]:
    """Returns a lowered function after each stage of the compiler, from the jaxpr to the last pass."""
    return [
        CompilerStage("jaxpr", str(lowered.jaxpr)),
        CompilerStage("prologue", str(lowered.prologue.jaxpr)),
        CompilerStage("program", program_text(lowered.program)),
        *(CompilerStage(each.name, each.text(lowered.program)) for each in PASSES),
    ]


def _state_of(step: RolloutStep) -> int:
    """Returns the bytes that one environment hands from step to step."""
    # Constants, and values equal to another value, take no register.
    each = [(leaf, place) for leaf in step.carried_leaves for place in leaf.places if step.carries(place)]
    return sum((leaf.width or 1) * leaf.dtype.itemsize for leaf, _ in each)


def _section_size(elf: bytes, wanted: str) -> int:
    """Returns the bytes of a section of a little-endian 64-bit ELF file, as written by NVIDIA tools."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + n * size) for n in range(count)]
    start = sections[names][4]
    name_of = lambda offset: elf[start + offset : elf.index(b"\0", start + offset)].decode()
    return next(section[5] for section in sections if name_of(section[0]) == wanted)
