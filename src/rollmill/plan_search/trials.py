"""Judges the candidates of a plan search by compiling and training them in separate processes."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.dataflow import Graph
from rollmill.plan_search.process import START_SECONDS, CandidateProcess
from rollmill.plan_search.search.candidate import Candidate, StageTimes, placed_seconds
from rollmill.plan_search.search.machine import Machine, Workload
from rollmill.plan_search.search.result_table import Measurement, MemoryEstimate
from rollmill.planning.plan import Plan, PlanSettings
from rollmill.programs.compiled import check_devices
from rollmill.programs.kernels import MIN_STEPS_TO_TUNE
from rollmill.runs.options import RunOptions
from rollmill.training.placing import choose_plan
from rollmill.training.request import TrainingRequest

CORES_FOR_THE_NEXT = 4
"""Number of cores from which the next candidate's process starts while a candidate still compiles.

The imports of the next process end before the current candidate is measured.
"""
FURTHER_PROCESS = 0.9
"""Memory of each additional process of a run, relative to a process that trains by itself. Processes share
libraries, and each compiles only parts of the run."""

PLACED_BY_CANDIDATES = (
    "distribution",
    "place",
    "devices",
    "workers",
    "actors",
    "learners",
    "asynchronous",
    "actors_on",
    "fusion",
)
"""Fields of `RunOptions` that a candidate sets."""


@dataclass
class ProcessTrials:
    """The functions of `plan_search.search.Trials`, which try one candidate at a time in a separate process."""

    graph_of: Callable[[int | None], Graph]
    """Returns the graph with a given number of environments, or with the user's own number for None."""
    training: TrainingRequest
    """The run to plan, without the options that candidates set."""
    options: RunOptions
    machine: Machine
    workload: Workload
    check_stop: Callable[[], None]
    environment: dict[str, str]
    times: StageTimes | None = None
    """Seconds of the two stages of the unfused program on one device, or None before they are measured."""
    process_bytes: int | None = None
    """Bytes that a process holds before it trains, or None before they are measured."""
    program_bytes: dict[int, float] = field(default_factory=dict)
    """Bytes that the unfused program needs on one GPU, by number of environments."""
    ends_at: float = math.inf
    """End of the budget, by `time.monotonic`. It does not apply until a candidate has been measured."""
    start_seconds: float = START_SECONDS
    """Maximum seconds for a candidate to compile, and again for it to be measured."""
    _has_measured: bool = False
    _open: tuple[Candidate, CandidateProcess] | None = field(default=None, repr=False)
    _next: CandidateProcess | None = field(default=None, repr=False)
    """A process that imports what it needs while another candidate is tried."""

    def close(self) -> None:
        """Ends all processes that have been started to try candidates."""
        self._end()
        if self._next is not None:
            self._next.close()
            self._next = None

    def _end(self) -> None:
        """Ends the process of a candidate, if one is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def plan_of(self, candidate: Candidate) -> Plan:
        """Returns the plan of a candidate. Raises a `UsageError` if the candidate cannot run."""
        graph = self.graph_of(candidate.num_envs)
        plan = choose_plan(graph, self._options_of(candidate))
        in_program = plan.place == "program"
        if in_program:
            check_devices(graph.loops, candidate.devices)
        settings = PlanSettings(
            devices=candidate.devices if in_program else None,
            fusion=candidate.fusion,  # type: ignore[arg-type]  # a name of a depth
            num_envs=graph.loops.num_envs,
        )
        return replace(plan, settings=settings)

    def check(self, candidate: Candidate) -> str | None:
        """Returns the reason not to try a candidate, or None if no reason is known without a trial."""
        try:
            plan = self.plan_of(candidate)
        except UsageError as error:
            return str(error)
        if candidate.fusion == "auto" and plan.place == "program":
            return self._explain_left_to_xla(candidate)
        return None

    def _explain_left_to_xla(self, candidate: Candidate) -> str | None:
        """Returns the reason why automatic fusion makes no kernel, if the training is short."""
        loops, platform = self.graph_of(candidate.num_envs).loops, "gpu" if self.machine.gpus else "cpu"
        steps, least = loops.iterations * loops.batch_size, MIN_STEPS_TO_TUNE[platform]
        if steps >= least:
            return None
        return (
            f"the same as fusion=off: kernels are timed only from {least:,} steps on, and {steps:,} steps were "
            "requested"
        )

    def predict_memory(self, candidate: Candidate) -> MemoryEstimate:
        """Compiles a candidate in a separate process, and predicts its memory. See `Trials.predict_memory`."""
        if candidate.place != "program":
            return MemoryEstimate(self._memory_of_workers(candidate))
        compiled = self._process(candidate).ask(None, "program", seconds=self._seconds)
        if compiled["process"] is not None and self.times is None:
            self.process_bytes = compiled["process"]
        memory = self._memory_of(compiled, candidate)
        if memory is not None and self.machine.gpus and candidate.devices == 1 and candidate.fusion == "off":
            self.program_bytes[self._num_envs(candidate)] = memory
        return MemoryEstimate(memory, compiled["identity"])

    def estimate_speed(self, candidate: Candidate) -> float | None:
        """Estimates the speed of a candidate from the stage times of the unfused program on one device."""
        same_batch = self._num_envs(candidate) == self.workload.num_envs
        fused = candidate.fusion not in (None, "off") or (
            candidate.place == "mesh" and self._explain_left_to_xla(candidate) is None
        )
        if self.times is None or not same_batch or fused:
            return None
        seconds = placed_seconds(candidate, self.times, cores=self.machine.cores)
        return self.workload.batch(candidate.num_envs) / seconds

    def predict_speed(self, candidate: Candidate) -> float | None:
        """Predicts the speed of a candidate from a few iterations of its program. See `Trials.predict_speed`."""
        if candidate.place != "program":
            return None
        batch = self.workload.batch(candidate.num_envs)
        process = self._process(candidate)
        seconds = process.ask("time", "seconds", seconds=self._seconds)
        if seconds is None:
            return None
        if self.times is None and candidate.devices == 1 and candidate.fusion == "off":
            collect = process.ask("stages", "collect", seconds=self._seconds)
            if collect is not None:
                self.times = StageTimes(min(collect, seconds), max(seconds - collect, 0.0))
        return batch / seconds

    def measure(self, candidate: Candidate, bound: float | None, seconds: float) -> Measurement:
        """Trains a candidate briefly in its process, and returns its speed and memory. See `Trials.measure`."""
        process = self._process(candidate)
        graph = self.graph_of(candidate.num_envs)
        learns_from = 0 if graph.replay is None else graph.replay.steps_before_learning(graph.loops)
        try:
            if candidate.place != "program":
                process.ask(None, "program", seconds=min(seconds, self.start_seconds))
            found = process.measure(
                bound=bound,
                seconds=min(seconds, self.start_seconds),
                seeds=self.workload.num_seeds,
                learns_from=learns_from,
            )
            self._has_measured = True
            # The GPU memory that workers use is unknown here, because JAX reserves most of it in advance.
            known = candidate.place == "program" or not self.machine.gpus
            return found if known else found._replace(memory=None)
        finally:
            self._end()

    @property
    def _seconds(self) -> float:
        """Longest wait for an answer."""
        left = self.ends_at - time.monotonic() if self._has_measured else self.start_seconds
        return min(max(left, 0.0), self.start_seconds)

    def _process(self, candidate: Candidate) -> CandidateProcess:
        """Returns the process of a candidate. The process of another candidate is ended."""
        if self._open is not None and self._open[0] == candidate:
            return self._open[1]
        self._end()
        process, self._next = self._next or self._start_process(), None
        self._open = candidate, process
        process.prepare(self.training.changed(candidate.given))
        if self.machine.cores >= CORES_FOR_THE_NEXT:
            self._next = self._start_process()
        return process

    def _start_process(self) -> CandidateProcess:
        return CandidateProcess(check_stop=self.check_stop, environment=self.environment)

    def _options_of(self, candidate: Candidate) -> RunOptions:
        default = RunOptions()
        decided = {name: getattr(candidate, name) for name in PLACED_BY_CANDIDATES}
        decided["fusion"] = candidate.fusion or default.fusion
        return replace(self.options, **decided)

    def _num_envs(self, candidate: Candidate) -> int:
        return candidate.num_envs or self.workload.num_envs

    def _memory_of_workers(self, candidate: Candidate) -> float | None:
        """Returns the bytes that the workers of one GPU need together, as one program or as separate processes."""
        if self.machine.gpus:
            together = self.program_bytes.get(self._num_envs(candidate))
            return None if together is None else together / max(candidate.gpus, 1)
        if self.process_bytes is None:
            return None
        return self.process_bytes * (1 + FURTHER_PROCESS * (candidate.processes - 1))

    def _memory_of(self, compiled: Mapping[str, Any], candidate: Candidate) -> float | None:
        """Returns the bytes of a GPU, or of the process and its arrays on all CPU devices."""
        if compiled["bytes"] is None:
            return None
        if self.machine.gpus:
            return float(compiled["held"] + compiled["bytes"])
        return (compiled["process"] or 0) + float(compiled["bytes"]) * candidate.devices
