"""Chooses how deep a run is fused: with kernels, by timing them in runs that are long enough, or only by XLA."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from rollmill.core.machine import Numerics
from rollmill.dataflow import Graph, State
from rollmill.programs.kernels import (
    MIN_STEPS_TO_TUNE,
    PARTS,
    Fusion,
    KernelChoice,
    KernelPart,
    KernelPlace,
    Launches,
    device_name,
    is_too_short,
    num_env_steps,
    plain_kernels,
)
from rollmill.programs.search_cost import SearchBudget


def choose_kernels(
    graph: Graph,
    *,
    fusion: Fusion,
    numerics: Numerics,
    unroll: int,
    devices: Sequence[Any],
    num_seeds: int,
    launches: Launches | None = None,
    parts: Collection[KernelPart] = PARTS,
    shares: int | None = None,
    before_timing: Callable[[], object] = lambda: None,
    budget: SearchBudget | None = None,
    begin: Callable[[], State] | None = None,
) -> KernelChoice:
    """Chooses how rollouts and gradients of a graph are computed: by kernels or by XLA.

    `fusion` is one of four choices. `off` leaves all parts to XLA, `rollout` computes policy and environment in a
    kernel, and `full` also the gradients. In runs that are long enough, `auto` times each possible kernel, and
    uses it if it is faster.

    If `launches` from the beginning of the run are given, nothing is timed on devices of the same kind. `parts`
    are the parts of an iteration to choose kernels for, and XLA computes the others. The environments are divided
    into `shares` equal parts, by default one per device. `before_timing` is called before anything is timed. A
    search stays within `budget`, and ends at its limit with the fastest kernels so far. If the run has a program
    that creates its first state on a single device, `begin` calls it, so that no other has to be compiled.

    Raises a `UsageError` if a requested kernel is not possible.
    """
    plain = plain_kernels(unroll)
    if fusion == "off" or (fusion == "auto" and devices[0].platform not in MIN_STEPS_TO_TUNE):
        return plain
    device = devices[0]
    plain = plain._replace(device=device_name(device))
    if launches is not None and launches.get("device") != plain.device:
        launches = None
    if fusion == "auto" and launches is None and is_too_short(graph, device.platform, num_seeds):
        steps = f"{num_env_steps(graph) * num_seeds:,} environment steps"
        note = f"nothing is fused: {steps} are too few to make up for the search for the fastest kernels"
        return plain if device.platform == "cpu" else plain.with_note(f"{note}. Use fusion=full to fuse anyway")
    # imported here, because most runs do not need the compiler
    from rollmill.programs.fused_kernels import choose_fused
    from rollmill.programs.tuning import Tuner

    place = KernelPlace(device, shares or len(devices), parts)
    with Tuner(device, before_timing, budget) as tuner:
        return choose_fused(graph, plain, fusion, numerics, unroll, place, launches, num_seeds, tuner, begin)


class KernelRequest(NamedTuple):
    """The arguments of `choose_kernels` for a whole iteration."""

    graph: Graph
    fusion: Fusion
    numerics: Numerics
    unroll: int
    devices: Sequence[Any]
    num_seeds: int
    launches: Launches | None
    turns: int = 1
    """Number of times that the program is called for one iteration of all seeds."""

    @property
    def seeds_at_once(self) -> int:
        """Number of seeds that one call of the program trains."""
        return self.num_seeds // self.turns

    def choose(
        self,
        before_timing: Callable[[], object],
        budget: SearchBudget | None = None,
        begin: Callable[[], State] | None = None,
    ) -> KernelChoice:
        """Chooses the kernels for this request, within `budget`. See `choose_kernels`."""
        choice = {name: value for name, value in self._asdict().items() if name != "turns"}
        return choose_kernels(**choice, before_timing=before_timing, budget=budget, begin=begin)


def backend_beside_training(graph: Graph, fusion: Fusion, numerics: Numerics) -> Any:
    """Returns the `fusion.Backend` for programs other than the training program, such as evaluations.

    Returns None if XLA should compute these programs. Kernels are used only on GPUs, where launches take most of
    the time of small steps.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or fusion == "off" or (fusion == "auto" and is_too_short(graph, "gpu")):
        return None
    from rollmill.programs.fused_kernels import usable_backend

    return usable_backend(device, numerics)
