"""What kernels are made in, each for a kind of device: Triton's language for GPUs, machine code for CPUs."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.fusion import gradients, rollout
from rollmill.fusion.gradients import GradientLaunch, GradientStep, Minibatch
from rollmill.fusion.native import CodeLaunch, describe_processor, usable_cores
from rollmill.fusion.pressure import Pressure
from rollmill.fusion.rollout import Launch, RolloutStep
from rollmill.fusion.stretches import is_long
from rollmill.fusion.triton_source import Numerics

AnyLaunch: TypeAlias = tuple[int, ...]


class Backend(NamedTuple):
    """How kernels are made for a kind of device, and how they can be launched."""

    package: str
    """What is needed to make them."""
    device: Callable[[Any], str]
    """What launches are found for."""
    check: Callable[[Any], None]
    """Raises a UsageError where a device has no kernels."""
    rollout_launches: Callable[[int, int], Sequence[AnyLaunch]]
    """`(environments, nodes of a step)`: what is worth trying for rollouts."""
    hopeless: Callable[[Pressure], str | None]
    """Why a step is not worth compiling unless a kernel is asked for; None where it is."""
    rollouts: Callable[[AnyLaunch], rollout.Run]
    """Runs rollouts."""
    rollout_text: Callable[[AnyLaunch, RolloutStep, Sequence[Any], Any, int], str]
    """From a launch, and what a run takes, all that its time depends on."""
    gradient_launches: Callable[[int, Any], Sequence[AnyLaunch]]
    """What is worth trying for a minibatch of so many samples on a device."""
    gradients: Callable[[AnyLaunch], gradients.Run]
    """Runs the gradients of minibatches."""
    gradient_text: Callable[[AnyLaunch, GradientStep, Minibatch], str]
    """From a launch, and what a run takes, all that its time depends on."""
    at_once: int
    """How many rollouts, or epochs, are timed at once: so many that no device waits for what launches them."""
    said: Callable[[str, AnyLaunch], str]
    """How `rollouts` or `gradients` are launched, in words."""


def backend_of(device: Any, numerics: Numerics) -> Backend:
    """What makes kernels for a device; `numerics` of products on GPUs, those on CPUs are exact.

    Raises:
        UsageError: where there is nothing that does.
    """
    backends = {"gpu": lambda: triton_kernels(numerics), "cpu": machine_code}
    if device.platform not in backends:
        raise UsageError(f"there are kernels for gpu and cpu, not for {device.platform}.")
    return backends[device.platform]()


def check_package(backend: Backend) -> None:
    """Whether what makes kernels is there.

    Raises:
        UsageError: if it is not, with the command that installs it.
    """
    if importlib.util.find_spec(backend.package) is None:
        raise UsageError(f"kernels need {backend.package}, which is missing: {install_command('fusion')}")


# --- NVIDIA's GPUs ---------------------------------------------------------------------------------------------

LEAST_CAPABILITY = 8.0
"""Of a chip: from Ampere on."""

ROLLOUTS = (
    *(Launch(16, 1), Launch(16, 2), Launch(32, 1), Launch(32, 2), Launch(64, 2), Launch(64, 4), Launch(128, 4)),
    *(Launch(32, 1, registers=128), Launch(128, 4, registers=128)),
)
LONG_ROLLOUT = Launch(16, 1)
"""The fastest of five for TagContinuous-Small-v0; each compiled for minutes."""
LONGEST = 15_000
"""Nodes of a step whose kernel compiles in two minutes or less, on one core."""
MOST_PRODUCTS = 100
"""Matrix products of a step; with 323, as in policies for MinAtar, kernels compile for many minutes."""
ROOM = 160
"""Numbers of a step at a time that find registers beside the network's and the addresses, about."""
CACHED = 8_192
"""Instructions of a kernel that is still faster than XLA where its numbers do not find registers.

Measured on an H200 by benchmarks/fusion_limits.py: with 7,600 a kernel is 1.5 times as fast, with 12,000 0.7.
"""
EXACT_ROLLOUTS = (Launch(16, 2), Launch(32, 4), Launch(16, 4), Launch(64, 4))
"""With exact products, which are no tensor cores' and need more registers."""
GRADIENTS = ((1, 128, 8), (2, 64, 4), (4, 64, 4), (4, 32, 2))
"""Programs on each multiprocessor of the chip, samples of a block and its warps, where gradients are summed."""


def triton_kernels(numerics: Numerics) -> Backend:
    """Kernels in Triton's language."""
    how = {"numerics": numerics}
    return Backend(
        package="triton",
        device=lambda device: device.device_kind,
        check=_check_chip,
        rollout_launches=partial(_rollout_launches, numerics),
        hopeless=hopeless_on_gpu,
        rollouts=lambda launch: partial(rollout.run_kernel, launch=Launch(*launch), **how),
        rollout_text=partial(_rollout_kernel_text, numerics),
        gradient_launches=_gradient_launches,
        gradients=lambda launch: partial(gradients.run_gradients_kernel, launch=GradientLaunch(*launch), **how),
        gradient_text=partial(_gradient_kernel_text, numerics),
        at_once=4,
        said=_said_of_kernels,
    )


def hopeless_on_gpu(pressure: Pressure) -> str | None:
    """Why a kernel would be slower than XLA, or take too long to compile; None where neither is known.

    In each step, one program goes through all of a kernel's instructions, alone on its scheduler. Numbers that
    find no register are kept in the data cache, and instructions that the instruction cache does not hold are
    fetched anew in every step. Numbers alone that find no register do not make a kernel slower than XLA; beside so
    many instructions they do.
    """
    if pressure.operations > LONGEST:
        return (
            f"a step is {pressure.operations:,} operations; a kernel of more than {LONGEST:,} compiles for minutes"
        )
    if (reason := many_products(pressure)) is not None:
        return reason
    instructions = pressure.instructions + pressure.guarded
    if pressure.live > ROOM and instructions > CACHED:
        return (
            f"a step holds up to {pressure.live:,} numbers at a time, and registers have room for about {ROOM}; "
            f"it is about {instructions:,} instructions, of which the cache holds {CACHED:,}: such a kernel "
            "is slower than XLA"
        )
    return None


def many_products(pressure: Pressure) -> str | None:
    """Why a program compiles for minutes, on a CPU as for a GPU; None where it does not."""
    if pressure.products <= MOST_PRODUCTS:
        return None
    return (
        f"a step is {pressure.products} matrix products, as convolutions are at each place of an image; with more "
        f"than {MOST_PRODUCTS}, it compiles for minutes"
    )


def _check_chip(device: Any) -> None:
    capability = str(device.compute_capability)
    if not capability.replace(".", "").isdigit() or float(capability) < LEAST_CAPABILITY:
        raise UsageError(
            f"kernels are for NVIDIA's chips from compute capability {LEAST_CAPABILITY} on; this one, "
            f"{device.device_kind}, has {capability}"
        )


def _rollout_launches(numerics: Numerics, num_envs: int, num_nodes: int) -> Sequence[Launch]:
    if numerics == "float32":
        return EXACT_ROLLOUTS[:1] if is_long(num_nodes) else EXACT_ROLLOUTS
    return [LONG_ROLLOUT] if is_long(num_nodes) else ROLLOUTS


def _gradient_launches(num_samples: int, device: Any) -> list[GradientLaunch]:
    processors = getattr(device, "core_count", None) or 128
    return [GradientLaunch(processors * n, *block) for n, *block in GRADIENTS]


def _rollout_kernel_text(numerics: Numerics, launch: AnyLaunch, *task: Any) -> str:
    kernel, _ = rollout.rollout_kernel(*task, launch=Launch(*launch), numerics=numerics)
    return f"{kernel.source}{kernel.constants}"


def _gradient_kernel_text(numerics: Numerics, launch: AnyLaunch, *task: Any) -> str:
    kernel, _ = gradients.gradient_kernel(*task, launch=GradientLaunch(*launch), numerics=numerics)
    return f"{kernel.source}{kernel.constants}"


def _said_of_kernels(what: str, launch: AnyLaunch) -> str:
    if what == "rollouts":
        own = Launch(*launch)
        few = f" of at most {own.registers} registers a thread" if own.registers else ""
        return f"blocks of {own.block} environments, {own.num_warps} warps each{few}"
    own = GradientLaunch(*launch)
    return f"{own.programs} programs of {own.block} samples, {own.num_warps} warps each"


# --- CPUs ------------------------------------------------------------------------------------------------------

ENVIRONMENTS_TOGETHER = 16
SAMPLES_TOGETHER = 32
"""Of a block: as many as the widest vectors have lanes, or twice as many."""
PARTS_OF_A_CORE = 4
"""Sums of samples that a core makes, one after the other: the last is never waited for long."""


def machine_code() -> Backend:
    """Machine code for this processor."""
    return Backend(
        package="llvmlite",
        device=lambda device: describe_processor(),
        check=lambda device: None,
        rollout_launches=_blocks,
        hopeless=many_products,
        rollouts=lambda launch: partial(run_rollout_code, launch=CodeLaunch(*launch)),
        rollout_text=lambda launch, *task: _code_text(_rollout_code(CodeLaunch(*launch), *task)),
        gradient_launches=_parts,
        gradients=lambda launch: partial(run_gradient_code, launch=CodeLaunch(*launch)),
        gradient_text=lambda launch, *task: _gradient_code_text(CodeLaunch(*launch), *task),
        at_once=1,
        said=_said_of_code,
    )


def _blocks(num_envs: int, num_nodes: int) -> list[CodeLaunch]:
    return [CodeLaunch(min(ENVIRONMENTS_TOGETHER, _power_of_two_within(num_envs)))]


def _parts(num_samples: int, device: Any) -> list[CodeLaunch]:
    block = min(SAMPLES_TOGETHER, _power_of_two_within(num_samples))
    return [CodeLaunch(block, min(PARTS_OF_A_CORE * usable_cores(), num_samples // block))]


def _said_of_code(what: str, launch: AnyLaunch) -> str:
    own = CodeLaunch(*launch)
    if what == "rollouts":
        return f"machine code, environments at once: {own.block}"
    return f"machine code, samples at once: {own.block}; parts: {own.programs}"


def run_rollout_code(
    step: RolloutStep, carried: list[Array], keys: Array, num_steps: int, *, launch: CodeLaunch
) -> tuple[list[Array], list[Array]]:
    """All steps as machine code on the CPU."""
    from rollmill.fusion.native.handler import call

    kernel = _rollout_code(launch, step, carried, keys, num_steps)
    found = call(kernel, [*carried, keys, *step.scalarised.uniforms])
    return rollout.unpack(step, found, carried, num_steps)


def run_gradient_code(step: GradientStep, minibatch: Minibatch, *, launch: CodeLaunch) -> Array:
    """All samples as machine code on the CPU, and the sum over its parts, always in the same order."""
    from rollmill.fusion.native.handler import call

    found = [
        call(*_gradient_code(part, step, minibatch, samples))[0] for part, samples in _shares(launch, minibatch)
    ]
    return jnp.sum(jnp.concatenate(found), axis=0) / minibatch.num_samples


def _shares(launch: CodeLaunch, minibatch: Minibatch) -> list[tuple[CodeLaunch, range]]:
    """As many samples as whole blocks hold, and those that are left in smaller ones."""
    whole = minibatch.num_samples // launch.block * launch.block
    left = minibatch.num_samples - whole
    shares = [(launch, range(whole)), (CodeLaunch(left & -left, 1), range(whole, whole + left))]
    return shares if left else shares[:1]


def _rollout_code(launch: CodeLaunch, step: RolloutStep, carried: Sequence[Any], keys: Any, num_steps: int) -> Any:
    from rollmill.fusion.native.rollout import rollout_code

    return rollout_code(step, carried, keys, num_steps, rollout.written(step), launch.block)


def _gradient_code(
    launch: CodeLaunch, step: GradientStep, minibatch: Minibatch, samples: range
) -> tuple[Any, list[Any]]:
    from rollmill.fusion.native.gradients import gradient_code

    return gradient_code(step, minibatch, launch, samples)


def _gradient_code_text(launch: CodeLaunch, step: GradientStep, minibatch: Minibatch) -> str:
    shares = _shares(launch, minibatch)
    return "\n".join(_code_text(_gradient_code(part, step, minibatch, samples)[0]) for part, samples in shares)


def _code_text(kernel: Any) -> str:
    """Processors of one kind may differ in speed."""
    from rollmill.fusion.native.processor import processor

    return f"{processor().name}\n{kernel.module}"


def _power_of_two_within(count: int) -> int:
    return 1 << (count.bit_length() - 1)
