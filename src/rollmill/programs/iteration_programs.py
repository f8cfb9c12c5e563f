"""Compiles the programs of a run: the iteration, with kernels or only by XLA, and in parallel the start."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from rollmill.core.errors import CannotFuse
from rollmill.dataflow import State, iteration_digest
from rollmill.programs.compile_lock import compiling_once
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import (
    Fusion,
    KernelChoice,
    device_name,
    is_too_short,
    plain_kernels,
    without_kernels,
)
from rollmill.programs.program_store import (
    KERNEL_PLATFORMS,
    NO_STORE,
    PLATFORMS,
    REPLAY_KERNEL_PLATFORMS,
    ProgramStore,
    StorableProgram,
    store_for,
    unknown_calls,
)
from rollmill.programs.search_cost import PROGRAM_SECONDS, ReadyKernels, SearchBudget, SearchRecords, StoredSeconds
from rollmill.programs.stored_choices import StoredChoices

PACKAGE = Path(__file__).parents[1]
MAKERS = sorted(
    file
    for pattern in (
        "core/trace_cache.py",
        "dataflow/loops.py",
        "dataflow/minibatch_loop.py",
        "fusion/backends/cpu/*.py",
        "lowerings/*.py",
        "physics/warp_robots.py",
        "programs/__init__.py",
        "programs/compiled.py",
        "programs/iteration_programs.py",
        "programs/kernels.py",
        "programs/repeated.py",
        "programs/states.py",
        "programs/threefry_code.py",
    )
    for file in PACKAGE.glob(pattern)
)
"""Source files that turn traces into programs: they lower operations, and repeat iterations and seeds."""

DEPTHS: Sequence[Fusion] = ("full", "rollout")
"""Values of `fusion` with kernels, the deepest first."""

MIN_TIMED_SECONDS, MAX_TIMED = 0.2, 20
"""Minimum seconds and maximum number of iterations to time. Timing ends at whichever comes first."""

TOO_LITTLE = "nothing is fused: kernels save less time in this run than compiling their program takes"
"""Note for the user."""

StepWith: TypeAlias = Callable[[KernelChoice], StorableProgram]
"""Function that returns the program of an iteration with the given kernels."""


class StepMaker(NamedTuple):
    """Chooses the kernels of an iteration and compiles its program."""

    request: KernelRequest
    step_with: StepWith
    mesh: Mesh
    before_timing: Callable[[], object]
    """Waits for programs that are compiled in parallel, because XLA times operations on a GPU meanwhile."""
    announce: Callable[[KernelChoice], None]
    """Called with the chosen kernels before they are compiled, to inform the other processes of a mesh."""
    seconds_of: Callable[[KernelChoice, jax.stages.Compiled], float]
    """Returns the seconds that an iteration takes with these kernels and their compiled program."""
    stores: list[ProgramStore]
    """Collects the stores that were searched for the program."""
    begin: Callable[[], State] | None = None
    """Returns the first state of the run, if it has a single seed and device."""

    def make(self) -> tuple[KernelChoice, jax.stages.Compiled]:
        """Chooses the kernels of an iteration and compiles its program, or loads both if they are stored."""
        stored, weighs = self._stored_choices(), self._weighs_cost()
        if (kernels := stored.read()) is not None:
            if (compiled := self._find_known(kernels)) is not None:
                return kernels, compiled
            if weighs and not self._save_their_program(kernels):
                return self._without_kernels(TOO_LITTLE)
        elif weighs:
            if (ready := self._ready()) is not None:
                return ready
            return self._within_budget(stored)
        kernels, compiled = self._search()
        stored.keep(kernels)
        return kernels, compiled

    def _within_budget(self, stored: StoredChoices) -> tuple[KernelChoice, jax.stages.Compiled]:
        """Chooses kernels by a search that loses little time, and compiles the iteration with those that pay."""
        budget, plain = self._budget()
        if not budget.pays:
            return self._without_kernels(str(budget), plain)
        kernels = self._choose(budget)
        stored.keep(kernels)
        if kernels.have_some and not budget.uses_kernels:
            return self._without_kernels(TOO_LITTLE, plain)
        if not kernels.have_some and plain is not None:
            return kernels, plain
        return self._make_with(kernels)

    def _without_kernels(
        self, note: str, compiled: jax.stages.Compiled | None = None
    ) -> tuple[KernelChoice, jax.stages.Compiled]:
        """Returns the iteration by XLA. The run records that it has no kernels, and continues without them."""
        kernels = plain_kernels(self.request.unroll).with_note(note)
        kernels = kernels._replace(device=device_name(self.request.devices[0]))
        return kernels, compiled or self._make_program(kernels)

    def _save_their_program(self, kernels: KernelChoice) -> bool:
        """Returns whether kernels save more than compiling their program takes."""
        saved = math.inf if kernels.saved is None else kernels.saved * self.request.graph.loops.iterations
        return saved > PROGRAM_SECONDS.get(self.request.devices[0].platform, math.inf)

    def _find_known(self, kernels: KernelChoice) -> jax.stages.Compiled | None:
        """Returns the iteration of a stored choice. None if it has kernels, and is not stored itself."""
        return (
            self._store(kernels).load(self.step_with(kernels))
            if kernels.have_some
            else self._make_program(kernels)
        )

    def _search(self) -> tuple[KernelChoice, jax.stages.Compiled]:
        """Chooses the kernels, and compiles the iteration."""
        return self._make_with(self._choose(None))

    def _choose(self, budget: SearchBudget | None) -> KernelChoice:
        request, alone = self.request, jax.process_count() == 1
        if alone and not (self._on_cpu or may_be_stored(self.mesh)):
            self.before_timing()
        # Processes of a mesh compile in the same order. All but the first wait for the kernels that the first has
        # chosen.
        kernels = request.choose(self.before_timing if alone else lambda: None, budget, self.begin)
        self.announce(kernels)
        return kernels

    def _make_with(self, kernels: KernelChoice) -> tuple[KernelChoice, jax.stages.Compiled]:
        request = self.request
        if not self._on_cpu:
            self.before_timing()
        try:
            return kernels, self._make_program(kernels)
        except CannotFuse as reason:
            kernels = without_kernels(request.fusion, request.unroll, reason)
            return kernels, self._make_program(kernels)

    @property
    def _calls(self) -> int:
        """Number of times that the run calls the program."""
        return self.request.graph.loops.iterations * self.request.turns

    @property
    def _on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    def _stored_choices(self) -> StoredChoices:
        request, makes_kernels = self.request, self.request.fusion != "off"
        if request.fusion == "auto" and request.launches is None:
            makes_kernels = not is_too_short(request.graph, request.devices[0].platform, request.num_seeds)
        return StoredChoices(request, makers_of_kernels() if makes_kernels and may_be_stored(self.mesh) else None)

    def _weighs_cost(self) -> bool:
        """Returns whether a search has to pay: where kernels are optional, and an iteration can be timed.

        One that calls functions of the host is not computed without need, and one with a replay memory takes less
        time at first than later. Where the seconds of an iteration cannot be stored, starts could differ.
        """
        graph, platform = self.request.graph, self.request.devices[0].platform
        if self.request.fusion != "auto" or self.request.launches is not None or not may_be_stored(self.mesh):
            return False
        if is_too_short(graph, platform, self.request.num_seeds) or graph.replay is not None:
            return False
        if platform not in PLATFORMS:
            return False
        return iteration_digest(graph) is not None

    def _ready(self) -> tuple[KernelChoice, jax.stages.Compiled] | None:
        """Returns kernels that a run asked for before, with their stored program. None if others may save more.

        They cost no more than their loading, so that they are worth it where a search is not.
        """
        request, device = self.request, self.request.devices[0]
        for fusion in DEPTHS if device.platform in KERNEL_PLATFORMS else ():
            kernels = StoredChoices(request._replace(fusion=fusion), makers_of_kernels()).read()
            compiled = kernels and kernels.have_some and self._store(kernels).load(self.step_with(kernels))
            if not kernels or not compiled:
                continue
            known = ["seconds", request.seeds_at_once, request.unroll, request.numerics, kernels.launches]
            stored = self._stored_seconds(known, makers_of_kernels())
            try:
                seconds = stored.read() or self.seconds_of(kernels, compiled)
            except jax.errors.JaxRuntimeError:  # there was too little memory for this program
                continue
            stored.keep(seconds)
            iterations, plain = self._calls, self._seconds_by_xla().read()
            if ReadyKernels(device.platform, iterations, seconds, plain).suffice:
                return kernels, compiled
        return None

    def _seconds_by_xla(self) -> StoredSeconds:
        return self._stored_seconds(["seconds", self.request.seeds_at_once, self.request.unroll], MAKERS)

    def _stored_seconds(self, known: Sequence[object], makers: Sequence[Path]) -> StoredSeconds:
        device, digest = self.request.devices[0], iteration_digest(self.request.graph)
        return StoredSeconds(store_for(device, digest, known, makers).name)

    def _budget(self) -> tuple[SearchBudget, jax.stages.Compiled | None]:
        """Returns the budget of searches, and the iteration by XLA if it had to be compiled and timed."""
        device, compiled = self.request.devices[0], None
        request, records = self.request, SearchRecords(device.platform, device_name(device))
        program_seconds = PROGRAM_SECONDS.get(device.platform, math.inf)
        kernels = plain_kernels(request.unroll)
        stored = self._seconds_by_xla()
        seconds = stored.read()
        if seconds is None:
            try:
                began = time.perf_counter()
                compiled = self._make_program(kernels)
                program_seconds = max(program_seconds, time.perf_counter() - began)
                seconds = self.seconds_of(kernels, compiled)
            # there was too little memory for this program, but kernels may need less
            except jax.errors.JaxRuntimeError:
                return SearchBudget(math.inf, program_seconds, records), None
            stored.keep(seconds)
        return SearchBudget(seconds * self._calls, program_seconds, records), compiled

    def _make_program(self, kernels: KernelChoice) -> jax.stages.Compiled:
        self.stores.append(self._store(kernels))
        return load_or_compile(self.step_with(kernels), self.stores[-1])

    def _store(self, kernels: KernelChoice) -> ProgramStore:
        """Returns the store for an iteration with these kernels.

        On CPUs, programs with kernels are not stored. On GPUs, programs with kernels and a replay memory are not
        stored.
        """
        request, device = self.request, self.mesh.devices.flat[0]
        platforms = KERNEL_PLATFORMS if request.graph.replay is None else REPLAY_KERNEL_PLATFORMS
        if not may_be_stored(self.mesh) or (kernels.have_some and device.platform not in platforms):
            return NO_STORE
        known: list[object] = [request.seeds_at_once, kernels.unroll]
        if kernels.have_some:
            known += [request.numerics, kernels.launches]
        makers = MAKERS if kernels.are_plain else makers_of_kernels()
        return store_for(device, iteration_digest(request.graph), known, makers)


def seconds_of_call(
    begin: Callable[[], Any], run: Callable[[Any], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measures the mean seconds of a call of a program, excluding the first.

    Args:
        begin: returns the state before the first call.
        run: maps a state to the next state.
        clock: returns the time in seconds.
    """
    state = jax.block_until_ready(run(begin()))
    began, count = clock(), 0
    while count < MAX_TIMED and (count == 0 or clock() - began < MIN_TIMED_SECONDS):
        state = jax.block_until_ready(run(state))
        count += 1
    return (clock() - began) / count


def load_or_compile(program: StorableProgram, store: ProgramStore) -> jax.stages.Compiled:
    """Loads a program from its store, or compiles it if it is not stored and no other process compiles it."""
    if (loaded := store.load(program)) is not None:
        return loaded
    with compiling_once(store.name) as lock:
        if (loaded := store.load(program)) is not None:
            return loaded
        lowered = program.lower(store.name)
        if lock.file is not None and unknown_calls(lowered):
            lock.release()  # there will be nothing for others to load
        return store.compile(program, lowered)


def may_be_stored(mesh: Mesh) -> bool:
    """Returns whether programs on this mesh are stored, which requires that the mesh has a single device."""
    return mesh.size == jax.process_count() == 1


def makers_of_kernels() -> list[Path]:
    """Returns the source files that determine programs with kernels."""
    return sorted(PACKAGE.rglob("*.py"))


class MadeBeside:
    """A program that a thread loads or compiles while the caller makes another.

    The caller's thread traces and lowers the program, because JAX settings belong to a thread.
    """

    def __init__(self, program: StorableProgram, store: ProgramStore) -> None:
        self._program, self._store = program, store
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "MadeBeside":
        program, store = self._program, self._store
        if store.has(program):
            self._made = self._pool.submit(store.load, program)
        else:
            self._made = self._pool.submit(store.compile, program, program.lower(store.name))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False)

    def wait(self) -> jax.stages.Compiled:
        """Waits for the program and returns it. If it could not be loaded, it is compiled in the
        calling thread.
        """
        return self._made.result() or load_or_compile(self._program, self._store)
