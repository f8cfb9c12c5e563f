"""Types that describe how rollouts and gradients of an iteration are computed: by a kernel or by XLA."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from rollmill.core.errors import CannotFuse, FusionError
from rollmill.core.machine import describe_processor
from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Group, Trajectory, Weights, collect, plain_minibatch_loop

Fusion: TypeAlias = Literal["auto", "off", "rollout", "full"]
"""Which parts of a run are computed by kernels: `auto`, `off`, `rollout` or `full`."""

Collect: TypeAlias = Callable[[Graph, Weights, Collector, Key], tuple[Collector, Trajectory]]
"""A function that collects a rollout, with the signature of `dataflow.collect`."""


class Implementation(NamedTuple):
    """How one part of an iteration is computed: by XLA, or by a kernel with a launch configuration."""

    function: Any
    fused: bool
    note: str | None = None
    """A note for the user."""
    launch: tuple[int, ...] | None = None
    """Launch configuration of the kernel, or None if XLA computes the part."""


Launches: TypeAlias = Mapping[str, Any]
"""Launch configurations of the kernels for `rollouts` and `gradients`, and the kind of `device` that they are for.

Without a kernel, a launch configuration is None. For a run in groups, the form is `{"groups": {group: launches}}`.
"""

MIN_STEPS_TO_TUNE = {"gpu": 100_000_000, "cpu": 10_000_000}
"""Number of environment steps, by platform, from which it pays off to compile and time kernels for a run."""


KernelPart: TypeAlias = Literal["rollouts", "gradients"]
"""A part of an iteration that a kernel may compute."""

PARTS: tuple[KernelPart, ...] = ("rollouts", "gradients")
"""All parts of an iteration that kernels may compute."""


class KernelChoice(NamedTuple):
    """How each part of an iteration is computed, with notes about the choice."""

    rollouts: Implementation
    """How rollouts are computed. Its function is a `Collect`."""
    gradients: Implementation
    """How gradients are computed. Its function is a `MakeMinibatchLoop`."""
    device: str | None = None
    """The kind of device that kernels were sought for, or None."""

    unroll: int = 1
    """Number of environment steps that are unrolled in the loop of XLA."""
    search: str | None = None
    """Note for the user about the time that the search for kernels took and will save, if there was one."""
    is_whole: bool = True
    """True if all kernels were tried within the time limit."""
    saved: float | None = None
    """Seconds that the kernels save in an iteration of all seeds, or None if they were not timed."""

    @property
    def are_plain(self) -> bool:
        """True if XLA computes all parts of an iteration."""
        return not self.have_some and self.unroll == 1

    @property
    def have_some(self) -> bool:
        """True if at least one part of an iteration is computed by a kernel."""
        return self.rollouts.fused or self.gradients.fused

    @property
    def notes(self) -> list[str]:
        """Notes for the user about all parts of the choice."""
        return [note for note in (self.rollouts.note, self.gradients.note, self.search) if note]

    @property
    def launches(self) -> Launches | None:
        """Launch configurations of the chosen kernels, which a run records, or None if no kernels were sought."""
        if self.device is None:
            return None
        return {"device": self.device, "rollouts": self.rollouts.launch, "gradients": self.gradients.launch}

    def with_note(self, note: str) -> "KernelChoice":
        """Returns this choice with an additional note for the user."""
        return self._replace(rollouts=self.rollouts._replace(note=note))


class KernelPlace(NamedTuple):
    """The device and the parts of an iteration for which kernels are sought."""

    device: Any
    """The device on which kernels are timed."""
    shares: int
    """Number of equal parts into which the environments are divided. One part is computed on this device."""
    parts: Collection[KernelPart] = PARTS
    """Parts of an iteration that are computed on this device."""


def seeds_side_by_side(graph: Graph, platform: str) -> bool:
    """Returns whether a program computes several seeds at once instead of one after the other.

    On a CPU, seeds usually run one by one, because batched products of small matrices are slower. With a replay
    memory, seeds always run at once, because copying each seed's memory out of the common array in every iteration
    would take too long.
    """
    return platform != "cpu" or graph.replay is not None


def device_name(device: Any) -> str:
    """Returns the name of a device under which a run records its launch configurations."""
    return describe_processor() if device.platform == "cpu" else device.device_kind


def is_too_short(graph: Graph, platform: str, num_seeds: int = 1) -> bool:
    """Returns whether a run is so short that `auto` uses no kernels, because timing them would take longer than
    they save.
    """
    return platform not in MIN_STEPS_TO_TUNE or num_env_steps(graph) * num_seeds < MIN_STEPS_TO_TUNE[platform]


def num_env_steps(graph: Graph) -> int:
    """Returns the total number of environment steps of a run."""
    return graph.loops.iterations * graph.loops.batch_size


def without_kernels(fusion: Fusion, unroll: int, reason: CannotFuse) -> KernelChoice:
    """Returns the choice that leaves everything to XLA after a kernel failed to compile.

    Raises a `UsageError` if `fusion` requested the kernel.
    """
    if fusion != "auto":
        raise impossible_fusion(fusion, reason, "gradients" if fusion == "full" else "rollouts") from reason
    return plain_kernels(unroll).with_note(f"nothing is fused: {reason}")


def plain_kernels(unroll: int) -> KernelChoice:
    """Returns the choice that leaves everything to XLA, with `unroll` unrolled environment steps."""
    return KernelChoice(
        Implementation(partial(collect, unroll=unroll), fused=False),
        Implementation(plain_minibatch_loop, fused=False),
        unroll=unroll,
    )


def kernel_parts(group: Group) -> Sequence[KernelPart]:
    """Returns the parts of an iteration that a group may compute by kernels, because it holds their fragments."""
    rollouts: Sequence[KernelPart] = ("rollouts",) if group.holds("environment", "policy") else ()
    return (*rollouts, "gradients") if group.holds("gradients") else rollouts


def sought_parts(fusion: Fusion) -> Sequence[KernelPart]:
    """Returns the parts of an iteration that may be computed by kernels with this value of `fusion`."""
    depths: Mapping[Fusion, Sequence[KernelPart]] = {"off": (), "rollout": ("rollouts",)}
    return depths.get(fusion, PARTS)


def impossible_fusion(fusion: Fusion, reason: Exception, part: KernelPart) -> FusionError:
    """Returns the error for a requested kernel that cannot be made, with the reason."""
    depths = ("full",) if part == "gradients" else ("full", "rollout")
    return FusionError(f"fusion={fusion} is not possible; fusion=auto trains without it. {reason}", depths)
