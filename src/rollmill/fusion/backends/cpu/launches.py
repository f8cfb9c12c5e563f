"""Launch configurations of CPU kernels. Imports LLVM, which may not be installed, only when needed."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.machine import describe_processor, usable_cores
from rollmill.fusion.backends.base import AnyLaunch, Backend, CompilingAhead, KernelKind, launch_problem
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.rollout import RolloutStep, unpack
from rollmill.fusion.lower.prologue import UniformArrays

ENVIRONMENTS_TOGETHER = 16
SAMPLES_TOGETHER = 32
"""Samples in a block: one or two vectors' worth on processors with the widest vectors."""
PARTS_OF_A_CORE = 4
"""Partial sums that a core computes, one after the other. Several small ones balance the load better than one."""


class CodeLaunch(NamedTuple):
    """Launch configuration of a CPU kernel."""

    block: int
    """Number of environments or samples computed together, a power of two."""
    programs: int = 0
    """Number of partial sums over the samples of a minibatch. Rollout kernels ignore it."""


def cpu_backend() -> Backend:
    """Returns the kernel backend for CPUs, which compiles kernels to machine code with LLVM."""
    return Backend(
        package="llvmlite",
        device_name=lambda device: describe_processor(),
        check=lambda device: None,
        reason_to_skip_gradients=lambda step: None,
        compile_seconds=lambda pressure: 0.0,
        timed_repeats=1,
        has_lanes=False,
        unroll=4,
        rollouts=KernelKind(
            launches=_blocks,
            run=lambda launch, lanes=1: partial(run_rollout_code, launch=CodeLaunch(*launch)),
            share=_same_launch,
            text=lambda launch, *task: _code_text(_rollout_code(CodeLaunch(*launch), *task)),
            describe=lambda launch: f"machine code, environments at once: {launch[0]}",
            compile_ahead=_nothing_ahead,
            find_problem=partial(launch_problem, CodeLaunch),
        ),
        gradients=KernelKind(
            launches=_parts,
            run=lambda launch, lanes=1: partial(run_gradient_code, launch=CodeLaunch(*launch)),
            share=_same_launch,
            text=lambda launch, *task: _gradient_code_text(CodeLaunch(*launch), *task),
            describe=lambda launch: f"machine code, samples at once: {launch[0]}; parts: {launch[1]}",
            compile_ahead=_nothing_ahead,
            find_problem=partial(launch_problem, CodeLaunch, required=2),
        ),
    )


def _same_launch(launch: AnyLaunch, lanes: int) -> AnyLaunch:
    return launch


def _nothing_ahead(launches: Sequence[AnyLaunch], *task: Any) -> CompilingAhead:
    """Prepares nothing, because LLVM compiles without holding the GIL, so that threads are enough."""
    return nullcontext(lambda number: None)


def _blocks(num_envs: int, num_nodes: int, *, largest_matrix: int = 0) -> list[CodeLaunch]:
    return [CodeLaunch(min(ENVIRONMENTS_TOGETHER, _power_of_two_within(num_envs)))]


def _parts(num_rows: int, device: Any, *, by_step: bool = False, largest_matrix: int = 0) -> list[CodeLaunch]:
    block = min(SAMPLES_TOGETHER, _power_of_two_within(num_rows))
    return [CodeLaunch(block, min(PARTS_OF_A_CORE * usable_cores(), num_rows // block))]


def run_rollout_code(
    step: RolloutStep,
    uniforms: UniformArrays,
    carried: list[Array],
    keys: Array,
    num_steps: int,
    *,
    launch: CodeLaunch,
) -> tuple[list[Array], list[Array]]:
    """Runs a whole rollout as machine code on the CPU."""
    from rollmill.fusion.backends.cpu.ffi import call

    kernel = _rollout_code(launch, step, uniforms, carried, keys, num_steps)
    return unpack(step, uniforms, call(kernel, [*carried, keys, *uniforms.slots]), carried, num_steps)


def run_gradient_code(step: GradientStep, minibatch: Minibatch, *, launch: CodeLaunch) -> Array:
    """Computes the mean gradients of a minibatch on the CPU, adding partial sums in a fixed order."""
    from rollmill.fusion.backends.cpu.ffi import call

    sums = [
        call(*_gradient_code(part, step, minibatch, samples))[0] for part, samples in _shares(launch, minibatch)
    ]
    return jnp.sum(jnp.concatenate(sums), axis=0) / minibatch.num_samples


def _shares(launch: CodeLaunch, minibatch: Minibatch) -> list[tuple[CodeLaunch, range]]:
    """Divides samples into whole blocks and smaller blocks for the remainder."""
    whole = minibatch.num_rows // launch.block * launch.block
    # `left & -left` is the largest power of two that divides the rest.
    left = minibatch.num_rows - whole
    shares = [(launch, range(whole)), (CodeLaunch(left & -left, 1), range(whole, whole + left))]
    return shares if left else shares[:1]


def _rollout_code(
    launch: CodeLaunch,
    step: RolloutStep,
    uniforms: UniformArrays,
    carried: Sequence[Any],
    keys: Any,
    num_steps: int,
) -> Any:
    from rollmill.fusion.backends.cpu.rollout import rollout_code

    return rollout_code(step, [*carried, keys, *uniforms.slots], keys.shape[0], num_steps, launch.block)


def _gradient_code(
    launch: CodeLaunch, step: GradientStep, minibatch: Minibatch, samples: range
) -> tuple[Any, list[Any]]:
    from rollmill.fusion.backends.cpu.gradients import gradient_code

    return gradient_code(step, minibatch, samples, block=launch.block, programs=launch.programs)


def _gradient_code_text(launch: CodeLaunch, step: GradientStep, minibatch: Minibatch) -> str:
    shares = _shares(launch, minibatch)
    return "\n".join(_code_text(_gradient_code(part, step, minibatch, samples)[0]) for part, samples in shares)


def _code_text(kernel: Any) -> str:
    """Processors of one kind may differ in speed."""
    from rollmill.fusion.backends.cpu.target import processor

    return f"{processor().name}\n{kernel.module}"


def _power_of_two_within(count: int) -> int:
    return 1 << (count.bit_length() - 1)
