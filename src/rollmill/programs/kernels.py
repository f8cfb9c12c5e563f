"""How an iteration is computed: its rollouts and its gradients, each by a kernel or by XLA."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from rollmill.core.errors import CannotFuse, FusionError
from rollmill.core.machine import describe_processor
from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Group, Trajectory, Weights, collect, plain_minibatch_loop

Fusion: TypeAlias = Literal["auto", "off", "rollout", "full"]
"""How deep a training is fused."""

Collect: TypeAlias = Callable[[Graph, Weights, Collector, Key], tuple[Collector, Trajectory]]
"""A function like `dataflow.collect`."""


class Implementation(NamedTuple):
    """The way in which one part of an iteration is computed: by XLA, or by a kernel and its launch."""

    function: Any
    fused: bool
    note: str | None = None
    """A note for the user."""
    launch: tuple[int, ...] | None = None
    """The launch of its kernel."""


Launches: TypeAlias = Mapping[str, Any]
"""Launches of the kernels for `rollouts` and `gradients`, None where there is none, on a `device` of this kind.

Those of a training in groups are `{"groups": {group: launches}}`.
"""

MIN_STEPS_TO_TUNE = {"gpu": 100_000_000, "cpu": 10_000_000}
"""Environment steps of a training from which on it pays to make kernels and to time them, by what computes it."""


KernelPart: TypeAlias = Literal["rollouts", "gradients"]
"""Part of an iteration that a kernel may compute."""

PARTS: tuple[KernelPart, ...] = ("rollouts", "gradients")
"""Parts of a whole iteration."""


class KernelChoice(NamedTuple):
    """The kernels chosen for the parts of an iteration, and notes about them."""

    rollouts: Implementation
    """A `Collect`."""
    gradients: Implementation
    """A `MakeMinibatchLoop`."""
    device: str | None = None
    """The device that kernels were sought for."""

    unroll: int = 1
    """Steps of the loop that are compiled as one, without a kernel."""
    search: str | None = None
    """A note for the user on what the search for the kernels took and saves, if there was one."""
    is_whole: bool = True
    """Whether all kernels were tried, in time."""

    @property
    def are_plain(self) -> bool:
        """Whether an iteration is computed as `dataflow.iterate` does by default."""
        return not self.have_some and self.unroll == 1

    @property
    def have_some(self) -> bool:
        """Returns whether any part is computed by a kernel."""
        return self.rollouts.fused or self.gradients.fused

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        return [note for note in (self.rollouts.note, self.gradients.note, self.search) if note]

    @property
    def launches(self) -> Launches | None:
        """The launches of its kernels, for a run to keep, or None if none were sought."""
        if self.device is None:
            return None
        return {"device": self.device, "rollouts": self.rollouts.launch, "gradients": self.gradients.launch}

    def with_note(self, note: str) -> "KernelChoice":
        """Adds a note for the user."""
        return self._replace(rollouts=self.rollouts._replace(note=note))


class KernelPlace(NamedTuple):
    """The part of a run to find kernels for."""

    device: Any
    """The device that they are timed on."""
    shares: int
    """Equal parts that the environments are divided into, one of them on this device."""
    parts: Collection[KernelPart] = PARTS
    """Parts of an iteration that are computed there."""


def seeds_side_by_side(graph: Graph, platform: str) -> bool:
    """Returns whether several seeds of a program are computed at once rather than one after the other.

    On a CPU, seeds run one by one at full speed, because batched products of small matrices are slower there. A
    replay memory, however, is too large to be taken out of the stack of all seeds for each iteration.
    """
    return platform != "cpu" or graph.replay is not None


def device_name(device: Any) -> str:
    """Returns the name of a device under which a run keeps its launches."""
    return describe_processor() if device.platform == "cpu" else device.device_kind


def is_too_short(graph: Graph, platform: str, num_seeds: int = 1) -> bool:
    """Returns whether `auto` makes no kernels for a program because timing them takes longer than it is worth."""
    return platform not in MIN_STEPS_TO_TUNE or num_env_steps(graph) * num_seeds < MIN_STEPS_TO_TUNE[platform]


def num_env_steps(graph: Graph) -> int:
    """Returns the number of environment steps of a run."""
    return graph.loops.iterations * graph.loops.batch_size


def without_kernels(fusion: Fusion, unroll: int, reason: CannotFuse) -> KernelChoice:
    """Falls back to XLA if a kernel fails to compile for the devices.

    Raises a `UsageError` if it was asked for.
    """
    if fusion != "auto":
        raise impossible_fusion(fusion, reason, "gradients" if fusion == "full" else "rollouts") from reason
    return plain_kernels(unroll).with_note(f"nothing is fused: {reason}")


def plain_kernels(unroll: int) -> KernelChoice:
    """Returns the choice that leaves everything to XLA."""
    return KernelChoice(
        Implementation(partial(collect, unroll=unroll), fused=False),
        Implementation(plain_minibatch_loop, fused=False),
        unroll=unroll,
    )


def kernel_parts(group: Group) -> Sequence[KernelPart]:
    """Returns the parts of an iteration that may be kernels in a group because it holds their fragments."""
    rollouts: Sequence[KernelPart] = ("rollouts",) if group.has("environment", "policy") else ()
    return (*rollouts, "gradients") if group.has("gradients") else rollouts


def sought_parts(fusion: Fusion) -> Sequence[KernelPart]:
    """Returns the parts of an iteration that may be kernels at this depth."""
    depths: Mapping[Fusion, Sequence[KernelPart]] = {"off": (), "rollout": ("rollouts",)}
    return depths.get(fusion, PARTS)


def impossible_fusion(fusion: Fusion, reason: Exception, part: KernelPart) -> FusionError:
    """Returns the error for a requested kernel that cannot be made."""
    depths = ("full",) if part == "gradients" else ("full", "rollout")
    return FusionError(f"fusion={fusion} is not possible; fusion=auto trains without it. {reason}", depths)
