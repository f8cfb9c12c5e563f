"""Chooses how deep a training is fused: how policy and environment become a rollout, and samples gradients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from rollmill.core.errors import CannotFuse, FusionError
from rollmill.core.machine import describe_processor
from rollmill.core.numerics import Numerics
from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Trajectory, Weights, collect, plain_minibatch_loop

Fusion: TypeAlias = Literal["auto", "off", "rollout", "full"]
"""How deep a training is fused."""

Collect: TypeAlias = Callable[[Graph, Weights, Collector, Key], tuple[Collector, Trajectory]]
"""A function like `dataflow.collect`."""


class Implementation(NamedTuple):
    """How one part of an iteration is computed."""

    function: Any
    fused: bool
    note: str | None = None
    """A note for the user."""
    launch: tuple[int, ...] | None = None
    """The launch of its kernel."""


Launches: TypeAlias = Mapping[str, Any]
"""Launches of the kernels for `rollouts` and `gradients`, None where there is none, on a `device` of this kind."""

MIN_STEPS_TO_TUNE = {"gpu": 100_000_000, "cpu": 10_000_000}
"""Environment steps of a training from which on it pays to make kernels and to time them, by what computes it."""


KernelPart: TypeAlias = Literal["rollouts", "gradients"]
"""Part of an iteration that a kernel may compute."""


class KernelChoice(NamedTuple):
    """How an iteration is computed."""

    rollouts: Implementation
    """A `Collect`."""
    gradients: Implementation
    """A `MakeMinibatchLoop`."""
    device: str | None = None
    """The device that kernels were sought for."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        return [part.note for part in (self.rollouts, self.gradients) if part.note]

    @property
    def launches(self) -> Launches | None:
        """The launches of its kernels, for a run to keep; None where none were sought."""
        if self.device is None:
            return None
        return {"device": self.device, "rollouts": self.rollouts.launch, "gradients": self.gradients.launch}

    def with_note(self, note: str) -> "KernelChoice":
        """Adds a note for the user."""
        return self._replace(rollouts=self.rollouts._replace(note=note))


def choose_kernels(
    graph: Graph,
    *,
    fusion: Fusion,
    numerics: Numerics,
    unroll: int,
    devices: Sequence[Any],
    num_seeds: int,
    launches: Launches | None = None,
) -> KernelChoice:
    """Chooses how the rollouts and gradients of a graph are computed on these devices.

    Args:
        graph: what is trained.
        fusion: `off` leaves all to XLA; `rollout` has the policy and the environment in a kernel, `full` the
            gradients too; `auto` takes each kernel where there is one and it is faster, by timing, in trainings
            that are long enough.
        numerics: precision of the kernels' matrix products.
        unroll: steps of the loop that are compiled as one.
        devices: which share the environments.
        num_seeds: trainings side by side.
        launches: as they were found when the run began; on devices of the same kind, nothing is timed then.

    Raises:
        UsageError: if a kernel was asked for and cannot be had.
    """
    plain = plain_kernels(unroll)
    if fusion == "off" or (fusion == "auto" and devices[0].platform not in MIN_STEPS_TO_TUNE):
        return plain
    device, steps = devices[0], graph.loops.iterations * graph.loops.batch_size
    plain = plain._replace(device=describe_processor() if device.platform == "cpu" else device.device_kind)
    if launches is not None and launches.get("device") != plain.device:
        launches = None
    if fusion == "auto" and launches is None and steps < MIN_STEPS_TO_TUNE[device.platform]:
        note = f"nothing is fused: for {steps:,} environment steps it does not pay to find the fastest kernels"
        return plain if device.platform == "cpu" else plain.with_note(f"{note}; fusion=full does so all the same")
    from rollmill.programs.fused_kernels import choose_fused  # most trainings do without the compiler

    return choose_fused(graph, plain, fusion, numerics, unroll, devices, launches, num_seeds)


def backend_beside_training(graph: Graph, fusion: Fusion, numerics: Numerics) -> Any:
    """Returns the `fusion.Backend` for programs beside a training. None if XLA computes them.

    Only on GPUs, where small steps wait for each other's launches; a CPU loses nothing by them.
    """
    device, steps = jax.devices()[0], graph.loops.iterations * graph.loops.batch_size
    if device.platform != "gpu" or fusion == "off" or (fusion == "auto" and steps < MIN_STEPS_TO_TUNE["gpu"]):
        return None
    from rollmill.programs.fused_kernels import usable_backend

    return usable_backend(device, numerics)


def without_kernels(fusion: Fusion, unroll: int, reason: CannotFuse) -> KernelChoice:
    """Falls back to XLA if a kernel fails to compile for the devices.

    Raises:
        UsageError: if a kernel was asked for.
    """
    if fusion != "auto":
        raise impossible_fusion(fusion, reason, "gradients" if fusion == "full" else "rollouts") from reason
    return plain_kernels(unroll).with_note(f"nothing is fused: {reason}")


def plain_kernels(unroll: int) -> KernelChoice:
    """Returns the choice that leaves everything to XLA."""
    return KernelChoice(
        Implementation(partial(collect, unroll=unroll), fused=False),
        Implementation(plain_minibatch_loop, fused=False),
    )


def impossible_fusion(fusion: Fusion, reason: Exception, part: KernelPart) -> FusionError:
    """Returns the error of a kernel that was asked for and cannot be made."""
    depths = ("full",) if part == "gradients" else ("full", "rollout")
    return FusionError(f"fusion={fusion} is not possible; auto trains without. {reason}", depths)
