"""Chooses how deep a training is fused: how policy and environment become a rollout, and samples gradients."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.errors import UsageError
from rollmill.core.types import Key
from rollmill.dataflow import (
    Batch,
    Collector,
    Graph,
    Learner,
    ManyDescents,
    State,
    Trajectory,
    Weights,
    collect,
    plain_descent,
    shuffled_rows,
    start,
)
from rollmill.fusion import (
    CannotFuse,
    GradientLaunch,
    Launch,
    Numerics,
    Tuned,
    check_gradients,
    check_rollout,
    first_batch,
    fused_collect,
    fused_descent,
    run_gradients_kernel,
    run_gradients_reference,
    run_kernel,
    run_reference,
    tune_descent,
    tune_rollout,
)

Fusion: TypeAlias = Literal["auto", "off", "rollout", "full"]
"""How deep a training is fused."""

Collect: TypeAlias = Callable[[Graph, Weights, Collector, Key], tuple[Collector, Trajectory]]
"""What `dataflow.collect` is."""


class Way(NamedTuple):
    """How one part of an iteration is computed."""

    function: Any
    fused: bool
    note: str | None = None
    """What the user is told."""
    launch: tuple[int, ...] | None = None
    """Of its kernel."""


Launches: TypeAlias = Mapping[str, Any]
"""Of the kernels for `rollouts` and `gradients`, None where there is none, on a `device` of this kind."""

LEAST_CAPABILITY = 8.0
"""Of a chip: from Ampere on."""

WORTH_TUNING = 100_000_000
"""Environment steps of a training from which on finding the fastest launches pays."""


class Ways(NamedTuple):
    """How an iteration is computed."""

    rollouts: Way
    """A `Collect`."""
    gradients: Way
    """A `ManyDescents`."""

    @property
    def notes(self) -> list[str]:
        """What the user is told."""
        return [way.note for way in self if way.note]

    def launches(self, device: Any) -> Launches | None:
        """How its kernels are launched, for a run to keep; None where a device has none."""
        if device.platform != "gpu":
            return None
        own = {"rollouts": self.rollouts.launch, "gradients": self.gradients.launch}
        return {"device": device.device_kind, **own}


def choose_ways(
    graph: Graph,
    *,
    fusion: Fusion,
    numerics: Numerics,
    unroll: int,
    devices: Sequence[Any],
    num_seeds: int,
    launches: Launches | None = None,
) -> Ways:
    """How the rollouts and the gradients of a graph are computed on these devices.

    Args:
        graph: what is trained.
        fusion: `off` leaves all to XLA; `rollout` has the policy and the environment in a kernel, `full` the
            gradients too, or on a CPU in the programs that the kernels are made from; `auto` takes each kernel
            where there is one and it is faster, by timing, in trainings that are long enough.
        numerics: of the kernels' matrix products.
        unroll: steps of the loop that are compiled as one.
        devices: which share the environments.
        num_seeds: trainings side by side.
        launches: as they were found when the run began; on devices of the same kind, nothing is timed then.

    Raises:
        UsageError: if a kernel was asked for and cannot be had.
    """
    plain = Ways(Way(partial(collect, unroll=unroll), fused=False), Way(plain_descent, fused=False))
    on_gpu = devices[0].platform == "gpu"
    if fusion == "off" or (fusion == "auto" and not on_gpu):
        return plain
    launches = _kept(launches, devices[0])
    steps = graph.loops.iterations * graph.loops.batch_size
    if fusion == "auto" and launches is None and steps < WORTH_TUNING:
        note = f"nothing is fused: for {steps:,} environment steps it does not pay to find the fastest kernels"
        return plain._replace(rollouts=plain.rollouts._replace(note=f"{note}; fusion=full does so all the same"))
    choice = _Choice(graph, fusion, numerics, unroll, devices, num_seeds, launches)
    rollouts = choice.way("rollouts", plain.rollouts, choice.rollouts, needed=fusion in ("rollout", "full"))
    if fusion == "rollout":
        return plain._replace(rollouts=rollouts)
    return Ways(rollouts, choice.way("gradients", plain.gradients, choice.gradients, needed=fusion == "full"))


def _kept(launches: Launches | None, device: Any) -> Launches | None:
    """Launches that were found on such a device."""
    return launches if launches is not None and launches.get("device") == device.device_kind else None


@dataclass(frozen=True)
class _Choice:
    """What was asked for, and where."""

    graph: Graph
    fusion: Fusion
    numerics: Numerics
    unroll: int
    devices: Sequence[Any]
    num_seeds: int
    launches: Launches | None

    @property
    def on_gpu(self) -> bool:
        return self.devices[0].platform == "gpu"

    def way(self, what: str, plain: Way, fused: Callable[[Way], Way], *, needed: bool) -> Way:
        """The fused way, or the plain one with the reason why."""
        if self.launches is not None and self.launches[what] is None and not needed:
            return plain
        try:
            self._check()
            return fused(plain)
        except (CannotFuse, UsageError) as reason:
            if needed:
                raise UsageError(
                    f"fusion={self.fusion} is not possible; auto trains without. {reason}"
                ) from reason
            return plain._replace(note=f"{what} are not fused: {reason}")

    def _check(self) -> None:
        if self.num_seeds > 1:
            raise UsageError(
                f"num_seeds={self.num_seeds} trains several seeds in one program, and a kernel holds one"
            )
        if self.on_gpu:
            _check_chip(self.devices[0])
            if importlib.util.find_spec("triton") is None:
                raise UsageError("kernels need packages that are missing: pip install 'rollmill[fusion]'")

    def rollouts(self, plain: Way) -> Way:
        check_rollout(self.graph)
        if not self.on_gpu:
            return Way(partial(fused_collect, run=run_reference), fused=True)
        found = self._tuned("rollouts", self._tune_rollouts)
        launch = Launch(*found.launch)
        run = partial(run_kernel, launch=launch, numerics=self.numerics)
        where = f"blocks of {launch.block} environments, {launch.num_warps} warps each"
        return self._faster("rollouts", found, plain, Way(partial(fused_collect, run=run), True, where, launch))

    def _tune_rollouts(self) -> Tuned:
        state = self._example
        weights = self.graph.weights(state.learner)
        return tune_rollout(self.graph, weights, state.collector, state.key, self.numerics, unroll=self.unroll)

    def gradients(self, plain: Way) -> Way:
        check_gradients(self.graph)
        if not self.on_gpu:
            return Way(_many(run_gradients_reference), fused=True)
        found = self._tuned("gradients", self._tune_gradients)
        launch = GradientLaunch(*found.launch)
        run = partial(run_gradients_kernel, launch=launch, numerics=self.numerics)
        where = f"{launch.programs} programs of {launch.block} samples, {launch.num_warps} warps each"
        return self._faster("gradients", found, plain, Way(_many(run), True, where, launch))

    def _tune_gradients(self) -> Tuned:
        with jax.default_device(self.devices[0]):
            learner, batch, rows = jax.jit(self._epoch)(self._example)
        return tune_descent(self.graph, learner, batch, rows, self.numerics)

    def _tuned(self, what: str, tune: Callable[[], Tuned]) -> Tuned:
        """The launch that the run began with, or else the fastest."""
        kept = (self.launches or {}).get(what)
        return tune() if kept is None else Tuned(tuple(kept))

    def _faster(self, what: str, found: Tuned, plain: Way, fused: Way) -> Way:
        """The fused way, but for `auto` where it is slower."""
        if found.gain is None:
            return fused._replace(note=f"{what} are one kernel ({fused.note}), as when this run began")
        if self.fusion == "auto" and found.gain < 1:
            return plain._replace(note=f"{what} are not fused: a kernel would take {1 / found.gain:.1f} x as long")
        return fused._replace(note=f"{what} are one kernel ({fused.note}), {found.gain:.1f} x as fast")

    # --- one device's share of a training -----------------------------------------------------------------

    @cached_property
    def _example(self) -> State:
        with jax.default_device(self.devices[0]):
            return jax.jit(self._start)()

    def _start(self) -> State:
        share = self.graph.loops.num_envs // len(self.devices)
        return start(self.graph, jax.random.key(0), jnp.arange(share, dtype=jnp.int32))

    def _epoch(self, state: State) -> tuple[Learner, Batch, Array]:
        """A learner, its first batch, and the rows of an epoch."""
        rows = shuffled_rows(state.key, state.collector.index, self.graph.loops)
        return *first_batch(self.graph, state), rows


def _many(run: Callable[..., Any]) -> ManyDescents:
    return partial(fused_descent, run=run)


def _check_chip(device: Any) -> None:
    capability = str(device.compute_capability)
    if not capability.replace(".", "").isdigit() or float(capability) < LEAST_CAPABILITY:
        raise UsageError(
            f"kernels are for NVIDIA's chips from compute capability {LEAST_CAPABILITY} on; this one, "
            f"{device.device_kind}, has {capability}"
        )
