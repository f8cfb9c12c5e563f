"""Chooses the kernels of a run by timing, if its steps can be lowered to kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.errors import CannotFuse, CheckpointError, FusionError, UsageError
from rollmill.core.machine import Numerics
from rollmill.core.types import Key
from rollmill.dataflow import Batch, Collector, Graph, Learner, State, Weights, init_state, shuffled_rows
from rollmill.fusion import (
    Backend,
    GradientStep,
    LaunchSearch,
    Pressure,
    RolloutStep,
    TunedLaunch,
    backend_for,
    check_package,
    estimate_step_pressure,
    first_batch,
    fused_collect,
    fused_minibatch_loop,
    largest_summed_size,
    largest_tiled_size,
    lower_gradients,
    lower_rollout,
    many_products,
    minibatch_loop_search,
    num_kernel_rows,
    rollout_search,
)
from rollmill.fusion.backends.base import KernelKind
from rollmill.lowerings.threefry import small_programs
from rollmill.programs.compiler_options import start_options
from rollmill.programs.kernels import (
    Fusion,
    Implementation,
    KernelChoice,
    KernelPart,
    KernelPlace,
    Launches,
    impossible_fusion,
    seeds_side_by_side,
    sought_parts,
)
from rollmill.programs.search_cost import MAX_COMPILE_SECONDS, MIN_GAIN, SearchTooLong
from rollmill.programs.tuning import Arguments, Tuner


def choose_fused(
    graph: Graph,
    plain: KernelChoice,
    fusion: Fusion,
    numerics: Numerics,
    unroll: int,
    place: KernelPlace,
    launches: Launches | None,
    num_seeds: int,
    tuner: Tuner,
    begin: Callable[[], State] | None = None,
) -> KernelChoice:
    """Chooses kernels for a graph, or returns `plain` if the graph has none. See `choose_kernels` for the
    arguments.
    """
    backend = backend_for(place.device, numerics)
    chooser = _Chooser(graph, fusion, backend, unroll, place, launches, tuner, num_seeds, begin)
    choice = _choose(chooser, plain)
    is_whole = not (tuner.was_late or (tuner.budget and tuner.budget.refused))
    choice = choice._replace(is_whole=is_whole, saved=chooser.saved_in_iteration() if chooser.saved else None)
    return choice._replace(search=chooser.account()) if tuner.seconds else choice


def possible_fusion(graph: Graph, numerics: Numerics) -> Fusion:
    """Returns the deepest fusion that is worth trying on the first device, without compiling or timing."""
    backend = usable_backend(jax.devices()[0], numerics)
    try:
        if backend is None or many_products(estimate_step_pressure(lower_rollout(graph))) is not None:
            return "off"
    except CannotFuse:
        return "off"
    try:
        lower_gradients(graph)
    except CannotFuse:
        return "rollout"
    return "full"


def check_kernels(graph: Graph, fusion: Fusion, numerics: Numerics, place: KernelPlace) -> None:
    """Raises a `FusionError` if a kernel that `fusion` requires cannot be made for `place`. Compiles nothing."""
    lower: dict[KernelPart, Callable[[Graph], object]] = {"rollouts": lower_rollout, "gradients": lower_gradients}
    for part in sought_parts(fusion):
        if part in place.parts:
            try:
                backend = backend_for(place.device, numerics)
                backend.check(place.device)
                check_package(backend)
                lower[part](graph)
            except (UsageError, CannotFuse) as reason:
                raise impossible_fusion(fusion, reason, part) from reason


def usable_backend(device: Any, numerics: Numerics) -> Backend | None:
    """Returns the fusion backend for a device, or None if no backend supports the device and `numerics`."""
    try:
        backend = backend_for(device, numerics)
        backend.check(device)
        check_package(backend)
    except UsageError:
        return None
    return backend


def _choose(choice: "_Chooser", plain: KernelChoice) -> KernelChoice:
    fusion = choice.fusion
    try:
        choice.check()
    except UsageError as reason:
        if fusion != "auto":
            raise impossible_fusion(fusion, reason, "rollouts") from reason
        return plain.with_note(f"nothing is fused: {reason}")
    if choice.launches is None:
        choice.tuner.keep_running(choice.backend.compilers())
    rollouts = choice.implementation("rollouts", plain.rollouts)
    if "gradients" not in choice.parts:
        return plain._replace(rollouts=rollouts)
    try:
        gradients = choice.implementation("gradients", plain.gradients)
    except FusionError as reason:
        if "rollouts" not in choice.parts:
            raise
        hint = "hint: fusion=rollout is possible: policy and environment become one kernel"
        raise FusionError(f"{reason}\n  {hint}", reason.depths) from reason
    return plain._replace(rollouts=rollouts, gradients=gradients)


class _Candidates(NamedTuple):
    """Candidate kernels for one part."""

    step: RolloutStep | GradientStep
    """The lowered step that all candidates are compiled from."""
    find_launch: Callable[[], TunedLaunch]


def _or_reason(make: Callable[[], _Candidates]) -> _Candidates | CannotFuse:
    try:
        return make()
    except CannotFuse as reason:
        return reason


@dataclass(frozen=True)
class _Chooser:
    """Options for choosing the kernels of one program, and the functions that compile and time them."""

    graph: Graph
    fusion: Fusion
    backend: Backend
    unroll: int
    place: KernelPlace
    launches: Launches | None
    tuner: Tuner
    num_seeds: int
    begin: Callable[[], State] | None = None
    """Returns the state with which a single seed begins on this device, or None if it is not available."""
    saved: dict[KernelPart, float] = field(default_factory=dict)
    """Seconds that a kernel saves in an iteration, as it was timed."""

    def account(self) -> str:
        """Returns a note with the seconds that the search took, and the seconds that its kernels save in the
        run.
        """
        took = f"the search for kernels took {self.tuner.seconds:.0f} s, once for this device and size"
        saved = self.saved_in_iteration() * self.graph.loops.iterations
        return f"{took}; they save about {saved:,.0f} s in this run" if self.saved else took

    def saved_in_iteration(self) -> float:
        """Returns the seconds that the kernels found so far save in an iteration of all seeds."""
        return sum(self.saved.values()) * (self.num_seeds // self.lanes)

    @property
    def lanes(self) -> int:
        """Number of runs that a kernel computes at the same time."""
        at_once = self.backend.has_lanes and seeds_side_by_side(self.graph, self.place.device.platform)
        return self.num_seeds if at_once else 1

    @property
    def parts(self) -> Sequence[KernelPart]:
        """Parts of an iteration that kernels may compute here."""
        sought = sought_parts(self.fusion)
        return [part for part in self.place.parts if part in sought]

    def check(self) -> None:
        """Raises a UsageError if kernels are impossible here."""
        self.backend.check(self.place.device)
        check_package(self.backend)

    def implementation(self, part: KernelPart, plain: Implementation) -> Implementation:
        """Returns the fused implementation of a part, or the plain one with the reason.

        The first call starts to compile the candidates of both kernels.
        """
        if part not in self.parts or self._is_left_out(part):
            return plain
        try:
            return self._fuse(part, plain)
        except CannotFuse as reason:
            if self._is_required(part):
                raise impossible_fusion(self.fusion, reason, part) from reason
            return plain._replace(note=f"{part} are not fused: {reason}")

    def _is_required(self, part: KernelPart) -> bool:
        """Returns whether the options ask for this kernel, however long it takes to compile."""
        return self.fusion != "auto" and part in self.parts

    def _is_left_out(self, part: KernelPart) -> bool:
        """Returns whether the run began without this kernel."""
        return self.launches is not None and self.launches.get(part) is None and not self._is_required(part)

    def _fuse(self, part: KernelPart, plain: Implementation) -> Implementation:
        candidates = self._candidates[part]
        if isinstance(candidates, SearchTooLong) and self.saved:
            candidates = _or_reason(self._searches[part])  # what others save can pay for its search
        if isinstance(candidates, CannotFuse):
            raise candidates
        kind, function = {
            "rollouts": (self.backend.rollouts, fused_collect),
            "gradients": (
                self.backend.gradients,
                partial(fused_minibatch_loop, unroll=self.backend.unroll),
            ),
        }[part]
        tuned = candidates.find_launch()
        launch = tuned.launch if self._began_with(part) else kind.share(tuned.launch, self.lanes)
        fused = partial(function, run=kind.run(launch, self.lanes), step=candidates.step)
        return self._faster(part, tuned, plain, Implementation(fused, True, kind.describe(launch), launch))

    @cached_property
    def _candidates(self) -> Mapping[KernelPart, "_Candidates | CannotFuse"]:
        """Returns the candidates of each kernel, or the reason why it has none.

        All candidates compile in the background from here on, side by side.
        """
        return {part: _or_reason(self._searches[part]) for part in self.parts if not self._is_left_out(part)}

    @property
    def _searches(self) -> Mapping[KernelPart, Callable[[], "_Candidates"]]:
        return {"rollouts": self._rollout_candidates, "gradients": self._gradient_candidates}

    def _rollout_candidates(self) -> "_Candidates":
        step = lower_rollout(self.graph)
        pressure = estimate_step_pressure(step)
        compile_seconds = self.backend.compile_seconds(pressure)
        self._check_size(pressure, compile_seconds)
        launches = self.backend.rollouts.launches(
            self._share, pressure.num_operations, largest_matrix=largest_tiled_size(step.program)
        )
        tune = partial(self._tune_rollouts, step, compile_seconds)
        return _Candidates(step, self._launch("rollouts", launches, tune))

    def _gradient_candidates(self) -> "_Candidates":
        step = lower_gradients(self.graph)
        if self.lanes > 1 and step.carried_leaves:  # has not been compared with XLA on a GPU
            raise CannotFuse(
                f"num_seeds={self.num_seeds} trains several seeds at once, but kernels for sequences support "
                "only one"
            )
        if self._is_free and (reason := self.backend.reason_to_skip_gradients(step)) is not None:
            raise CannotFuse(f"{reason}. Use fusion=full to fuse anyway")
        shapes = jax.eval_shape(self._epoch, self._example_shapes)
        launches = self.backend.gradients.launches(
            num_kernel_rows(self.graph, step, *shapes),
            self.place.device,
            by_step=bool(step.carried_leaves),
            largest_matrix=largest_summed_size(step),
        )
        return _Candidates(step, self._launch("gradients", launches, partial(self._tune_gradients, step)))

    @property
    def _is_free(self) -> bool:
        """Returns whether neither the options nor the begin of the run ask for kernels."""
        return self.fusion == "auto" and self.launches is None

    def _check_size(self, pressure: Pressure, compile_seconds: float) -> None:
        """Raises `CannotFuse` if a kernel takes too long to compile, unless the options request it."""
        reason = many_products(pressure)
        if reason is None and self.tuner.budget is None and compile_seconds > MAX_COMPILE_SECONDS:
            reason = (
                f"the kernel would take about {compile_seconds:,.0f} s to compile, more than the limit of "
                f"{MAX_COMPILE_SECONDS} s for runs whose duration is not estimated"
            )
        if self._is_free and reason is not None:
            raise CannotFuse(f"{reason}. Use fusion=rollout to fuse anyway")

    def _tune_rollouts(
        self, step: RolloutStep, compile_seconds: float, launches: Sequence[tuple[int, ...]]
    ) -> Callable[[], TunedLaunch]:
        shapes, device = self._example_shapes, self.place.device
        search = rollout_search(self.graph, shapes, self.backend, launches, device, unroll=self.unroll, step=step)
        search = search._replace(compile_seconds=compile_seconds)

        def arguments() -> tuple[Weights, Collector, Key]:
            state = self._example
            return self.graph.weights(state.learner), state.collector, state.key

        return self._start_search(search, lambda: arguments)

    def _tune_gradients(
        self, step: GradientStep, launches: Sequence[tuple[int, ...]]
    ) -> Callable[[], TunedLaunch]:
        shapes = jax.eval_shape(self._epoch, self._example_shapes)
        search = minibatch_loop_search(self.graph, shapes, self.backend, launches, self.place.device, step=step)

        def prepare() -> Callable[[], tuple[Learner, Batch, Array]]:
            epoch = self.tuner.compile_once(self._epoch, self._example_shapes)
            return lambda: epoch.result()(self._example)

        return self._start_search(search, prepare)

    def _start_search(self, search: LaunchSearch, prepare: Callable[[], Arguments]) -> Callable[[], TunedLaunch]:
        """Starts a search, which compares kernels with XLA if the choice depends on it."""
        return self.tuner.start(search if self.fusion == "auto" else search.without_comparison(), prepare)

    def _launch(
        self,
        part: KernelPart,
        launches: Sequence[tuple[int, ...]],
        tune: Callable[[Sequence[tuple[int, ...]]], Callable[[], TunedLaunch]],
    ) -> Callable[[], TunedLaunch]:
        """Returns the launch the run began with, or else the only one or the fastest."""
        if (launch := self._began_with(part)) is not None:
            return lambda: TunedLaunch(tuple(launch))
        kind = self._kind(part)
        if self.fusion != "auto" and len(launches) == 1 and not kind.is_unverified(launches[0]):
            return lambda: TunedLaunch(tuple(launches[0]))
        return tune(launches)

    def _began_with(self, part: KernelPart) -> Sequence[int] | None:
        """Returns the launch of a part's kernel that the run began with.

        Raises a `CheckpointError` if it is no launch of this backend.
        """
        launch = (self.launches or {}).get(part)
        if launch is not None and (problem := self._kind(part).find_problem(launch)):
            raise CheckpointError(
                f"the run has recorded launches.{part}={list(launch)}, but {problem}. hint: remove launches from "
                "its config.json. Its kernels are then chosen again."
            )
        return launch

    def _kind(self, part: KernelPart) -> KernelKind:
        return self.backend.rollouts if part == "rollouts" else self.backend.gradients

    def _faster(
        self, part: KernelPart, tuned: TunedLaunch, plain: Implementation, fused: Implementation
    ) -> Implementation:
        """Returns the fused implementation, or for `auto` the plain one if that is faster."""
        if tuned.speedup is None:
            began = ", as at the beginning of this run" if self.launches is not None else ""
            return fused._replace(note=f"{part} are one kernel ({fused.note}){began}")
        if self.fusion == "auto" and tuned.speedup < MIN_GAIN:
            return plain._replace(
                note=(f"{part} are not fused, because a kernel would take {1 / tuned.speedup:.1f} x as long")
            )
        self.saved[part] = self._seconds_saved(part, tuned)
        if self.tuner.budget is not None:
            self.tuner.budget.saved = self.saved_in_iteration() * self.graph.loops.iterations
        return fused._replace(note=f"{part} are one kernel ({fused.note}), {tuned.speedup:.1f} x as fast")

    def _seconds_saved(self, part: KernelPart, tuned: TunedLaunch) -> float:
        """Returns the seconds that a kernel saves in an iteration."""
        seconds = ((tuned.unfused_seconds or 0.0) - (tuned.seconds or 0.0)) / self.backend.timed_repeats
        if part == "rollouts":
            return seconds
        loops = self.graph.loops  # with a replay memory, one minibatch is timed
        return seconds * loops.epochs * (1 if self.graph.replay is None else loops.num_minibatches)

    # --- the share of one device; several lanes are timed as one large lane ---------------------------------

    @property
    def _share(self) -> int:
        return self.graph.loops.num_envs // self.place.shares * self.lanes

    @cached_property
    def _example(self) -> State:
        """A state with the environments of one device, and without replay memory."""
        with jax.default_device(self.place.device):
            if self.begin is not None and self.graph.replay is None and self._share == self.graph.loops.num_envs:
                return jax.device_put(self.begin(), self.place.device)
            with small_programs(self.place.device.platform):
                return jax.jit(self._start, compiler_options=start_options())()

    @cached_property
    def _example_shapes(self) -> State:
        return jax.eval_shape(self._start)

    def _start(self) -> State:
        state = init_state(self.graph, jax.random.key(0), jnp.arange(self._share, dtype=jnp.int32))
        return State(state.collector, state.learner, state.key, state.iteration)  # leaves the replay memory out

    def _epoch(self, state: State) -> tuple[Learner, Batch, Array]:
        """Returns a learner, its first batch, and the rows of an epoch."""
        learner, batch = first_batch(self.graph, state)
        if self.graph.replay is not None:  # the batch is a single minibatch
            (count,) = {leaf.shape[1] for leaf in jax.tree.leaves(batch)}
            return learner, batch, jnp.arange(count, dtype=jnp.uint32)[None]
        return learner, batch, shuffled_rows(state.key, state.collector.index, self.graph.loops)
