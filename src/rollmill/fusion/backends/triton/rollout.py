"""Computes a whole rollout in one GPU kernel."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rollmill.core.errors import CannotFuse
from rollmill.core.machine import Numerics
from rollmill.core.operations import ROLLOUT_KERNEL
from rollmill.fusion.backends.triton.codegen import MemoryPlace, TritonWriter
from rollmill.fusion.backends.triton.compile import Kernel, call, call_in_lanes, entry
from rollmill.fusion.backends.triton.hoist import NOTHING_KEPT, KeptMatrices, columns
from rollmill.fusion.backends.triton.leaf_io import LeafIO
from rollmill.fusion.backends.triton.memories import StepStores
from rollmill.fusion.backends.triton.memory import BY_INSTRUCTIONS, BY_TRITON
from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.registers import ENV_PER_THREAD, ENV_PER_THREAD_BOTH_WAYS
from rollmill.fusion.backends.triton.reloading import FAR, matrices_fit, read_where_used, slots_read_again
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Program, count_nodes
from rollmill.fusion.kernels.memories import in_order_of_writes
from rollmill.fusion.kernels.rollout import RolloutStep, aliased_outputs, unpack, written_leaves
from rollmill.fusion.lower.prologue import UniformArrays
from rollmill.fusion.opt.row_tiles import divide_into_tiles
from rollmill.fusion.opt.schedule import schedule_of
from rollmill.fusion.opt.segments import needs_segments

MAX_REGISTERS = 255
"""Maximum number of registers per thread. Without an explicit limit, the compiler may give large kernels only a
quarter of them."""


class Launch(NamedTuple):
    """Launch configuration of a rollout kernel on a GPU."""

    block: int = 64
    """Environments per block, a power of two of at least 16."""
    num_warps: int = 4
    max_registers: int = 0
    """Maximum number of registers per thread. With fewer, more blocks run at once. 0 allows the maximum."""
    tile: int = 0
    """Columns of the tiles that wide rows and matrices are divided into, or 0 to leave them whole."""
    kept_kilobytes: int = 0
    """Kilobytes of matrix tiles that stay on the chip. All others are reloaded in every step. Only with `tile`."""


def run_kernel(
    step: RolloutStep,
    uniforms: UniformArrays,
    carried: list[Array],
    keys: Array,
    num_steps: int,
    *,
    launch: Launch,
    numerics: Numerics,
    lanes: int = 1,
) -> tuple[list[Array], list[Array]]:
    """Computes a whole rollout in one GPU kernel. With several `lanes`, call it inside `jax.vmap`."""
    kernel, arrays = rollout_kernel(step, uniforms, carried, keys, num_steps, launch=launch, numerics=numerics)
    found = (call if lanes == 1 else call_in_lanes)(kernel, arrays)
    return unpack(step, uniforms, found, carried, num_steps)


def rollout_kernel(
    step: RolloutStep,
    uniforms: UniformArrays,
    carried: Sequence[Any],
    keys: Any,
    num_steps: int,
    *,
    launch: Launch,
    numerics: Numerics,
) -> tuple[Kernel, list[Any]]:
    """Returns the kernel of a rollout, and the arrays that it takes."""
    num_envs = keys.shape[0]
    source = rollout_source(step, num_steps, num_envs, launch.block, numerics, launch.tile, launch.kept_kilobytes)
    struct = lambda leaf, *axes: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype)
    outputs = [struct(leaf, num_envs) for leaf in written_leaves(step)]
    outputs += [struct(leaf, num_steps, num_envs) for leaf in step.step_leaves if leaf.places]
    constants = {"N": num_envs, "T": num_steps, "BLOCK": launch.block}
    programs = -(-num_envs // launch.block)
    kernel = Kernel(
        source,
        programs,
        tuple(outputs),
        constants,
        launch.num_warps,
        len(uniforms.slots),
        registers=launch.max_registers or MAX_REGISTERS,
        aliases=aliased_outputs(step),
    )
    return kernel, [*carried, keys, *uniforms.slots]


# --- its source -------------------------------------------------------------------------------------------


# shared by launches that differ only in warps, and by the program that is compiled in the end
@lru_cache(maxsize=64)
def rollout_source(
    step: RolloutStep,
    num_steps: int,
    num_envs: int,
    block: int,
    numerics: Numerics,
    tile: int = 0,
    kept_kilobytes: int = 0,
) -> str:
    """Generates the source of a rollout kernel.

    The kernel takes pointers to the leaves of the collector (the state carried from step to step), to the random
    keys and to the uniform arrays. Pointers to its outputs follow: the collector's changed leaves, and the leaves
    of the trajectory. `N` environments, `T` steps and `BLOCK` are compile-time arguments. Rows wider than `tile`
    are divided, if it is not 0, and `kept_kilobytes` of matrix tiles stay on the chip.
    """
    program, slots = _program_of(step, tile), range(step.prologue.num_slots)
    leaves = [*step.carried_leaves, *step.fixed_leaves]
    changes = step.may_change
    before, uniform = [f"in{n}" for n in range(len(leaves))], [f"uniform{n}" for n in slots]
    after = [f"after{n}" for n, does in enumerate(changes) if does]
    out = [f"step{n}" for n, leaf in enumerate(step.step_leaves) if leaf.places]
    memory = BY_INSTRUCTIONS if needs_segments(count_nodes(program.nodes())) else BY_TRITON
    again = bool(tile) or not matrices_fit(program.nodes())
    kept_slots = KeptMatrices(uniform, kept_kilobytes * 1024) if again else NOTHING_KEPT
    source = KernelSource(
        numerics, slots_read_again(uniform) if again else uniform, memory=memory, kept=kept_slots
    )
    writer = TritonWriter(source, apart=ENV_PER_THREAD_BOTH_WAYS if numerics == "float32" else ENV_PER_THREAD)
    # If all blocks are full, no access needs a mask.
    mask = "" if num_envs % block == 0 else "here"
    places = LeafIO(source, mask)

    aliases = aliased_outputs(step)
    numbered = [(n, leaf) for n, leaf in enumerate(step.carried_leaves) if leaf.memory is not None]
    writer.cells = [
        MemoryPlace(f"after{n}" if n in aliases else before[n], f"cells{n}", math.prod(leaf.shape))
        for n, leaf in numbered
    ]
    last = "tl.minimum(env, N - 1)" if mask else "env"  # an existing environment, for lanes beyond the last
    for n, leaf in numbered:
        source.line(f"cells{n} = {last}.to(tl.int64) * {math.prod(leaf.shape)}")
    stores = StepStores(writer, in_order_of_writes(step.leaves_after), mask)
    each = zip(before, leaves, strict=True)
    loaded = [name for pointer, leaf in each for name in places.load(pointer, "env", leaf)]
    inputs = writer.named(program.inputs[: len(loaded)], loaded)
    # The lines so far, the loads of the state, come before the loop over steps.
    opening, source.lines = source.lines, []
    source.deeper()
    source.line(f"at = {_wide_enough('t', step, num_steps * num_envs)} * N + env")
    schedule = schedule_of(program, segmented=True)
    outputs = writer.write(schedule, [*inputs, *_turn(source)])
    for n, leaf in enumerate(step.step_leaves):
        if leaf.places:
            places.store(f"step{n}", "at", leaf, [outputs[place] for place in leaf.places])
    stores.write(program.outputs, outputs)
    _advance(source, step, inputs, outputs)
    source.deeper(-1)
    uniforms, turn, source.lines = source.before.lines, source.lines, []
    if again:
        # The compiler knows the bounds of a step, but not of a program's index.
        uniforms, turn = read_where_used(uniforms, turn, "t + tl.program_id(0)")
    for n, (leaf, does) in enumerate(zip(step.carried_leaves, changes, strict=True)):
        if does and leaf.memory is None:
            places.store(f"after{n}", "env", leaf, [inputs[place] for place in leaf.places])
    arguments = ", ".join([*before, *uniform, *after, *out])
    head = [
        *stores.functions,
        "@triton.jit",
        f"def {ROLLOUT_KERNEL}({arguments}, N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):",
        "    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        *(["    here = env < N"] if mask else []),
        *([f"    {FAR}"] if again else []),
    ]
    loop = ["    for t in range(T):", *turn]
    return "\n".join([*head, *uniforms, *opening, *loop, *source.lines, "", entry(ROLLOUT_KERNEL)])


def _program_of(step: RolloutStep, tile: int) -> Program:
    """Returns the program of a step, with rows of at most `tile` columns if it is not 0."""
    if not tile:
        return step.program
    found = divide_into_tiles(step.program, tile)
    if found is None or any(len(places) > 1 for places in found.outputs):
        raise CannotFuse(
            f"the step passes rows of more than {tile} columns to the next step, which tiled kernels do not "
            "support."
        )
    return found.program


def _wide_enough(t: str, step: RolloutStep, rows: int) -> str:
    """Returns the type of a step's number: 32 bits if offsets into all leaves of the trajectory fit."""
    most = max((int(np.prod(leaf.shape)) for leaf in step.step_leaves), default=1)
    return t if rows * most < 2**31 else f"{t}.to(tl.int64)"


def _turn(source: KernelSource) -> list[str]:
    source.line("turn = tl.full([BLOCK], t, tl.int32)")
    return ["turn"]


def _advance(source: KernelSource, step: RolloutStep, inputs: list[str], outputs: list[str]) -> None:
    """Assigns the carried values after a step, all at once."""
    moves = []
    for before, after, does in zip(step.carried_leaves, step.leaves_after, step.may_change, strict=True):
        if does:
            pairs = zip(before.places, after.places, strict=True)
            moves += [(inputs[place], outputs[new], before) for place, new in pairs if step.carries(place)]
    values = []
    for _, new, leaf in moves:
        values.append(source.fresh())
        shape = "[BLOCK]" if leaf.width is None else f"[BLOCK, {columns(leaf.width)}]"
        source.line(f"{values[-1]} = tl.broadcast_to({new}, {shape}).to({TYPES[leaf.dtype.name]})")
    # All new values are named before the first assignment, because the new value of one leaf may be the old value
    # of another.
    for (name, _, _), new in zip(moves, values, strict=True):
        source.line(f"{name} = {new}")
