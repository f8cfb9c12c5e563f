"""Searches for the fastest plan of a run on this machine, or reuses the stored result of an earlier search."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import jax

from rollmill.core.errors import UsageError
from rollmill.core.machine import (
    device_memory,
    hardware,
    leave_device_memory,
    memory_bytes,
    own_commit,
    usable_cores,
    versions,
)
from rollmill.core.text import format_count
from rollmill.dataflow import Graph, fingerprint, interfaces
from rollmill.gpus.mps import mps_obstacle
from rollmill.plan_search.process import SearchStopped
from rollmill.plan_search.result_store import file_for, read_stored, store
from rollmill.plan_search.search.candidate import Candidate, select_candidates
from rollmill.plan_search.search.enumeration import candidates, most_stepping
from rollmill.plan_search.search.machine import DECIDED, DEFAULT_BUDGET, Machine, Objective, Workload
from rollmill.plan_search.search.result_table import PlanTable
from rollmill.plan_search.search.searching import Trials, search
from rollmill.plan_search.step_waits import waiting_share
from rollmill.plan_search.trials import ProcessTrials
from rollmill.planning.plan import Plan
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.runs.options import RunOptions
from rollmill.training.request import TrainingRequest

END_SECONDS = 6.0
"""Seconds of a search's budget, at most a tenth, that are reserved for ending the last processes."""
MAX_INSTANCES = 4
"""Maximum number of processes of a run that share a GPU under MPS. Each number up to it is a candidate."""


UNSEARCHED = ("run_dir", "resume_if_exists", "track", "dashboard", "quiet", "tensorboard")
"""Options of a run that candidates do not take over."""


@dataclass(frozen=True)
class SearchRequest:
    """A request to search for the fastest plan of a run."""

    training: TrainingRequest
    objective: Objective = "keep-batch"
    budget: float = DEFAULT_BUDGET
    """Maximum duration of the search in seconds."""
    fresh: bool = False
    """True to search again even if the result of an earlier search is stored."""

    @property
    def options(self) -> RunOptions:
        """The options of the run, as the user requested them."""
        return self.training.options

    @property
    def fixed(self) -> dict[str, Any]:
        """Fields of candidates whose values the user has chosen."""
        given, options = self.training.settings, self.options
        return {name: getattr(options, name) for name in DECIDED if name in given}


class FoundPlan(NamedTuple):
    """The plan that a search has chosen, and the table of its candidates."""

    plan: Plan
    table: PlanTable
    is_stored: bool
    """True if the plan was found by an earlier search."""


def leave_devices() -> dict[str, str]:
    """Makes this process allocate accelerator memory only on demand, if JAX has not started yet.

    Returns the environment variables for processes that train, as the user has set them.
    """
    environment = dict(os.environ)
    leave_device_memory()
    return environment


def this_machine() -> Machine:
    """Describes this machine, as far as JAX may use it. Starts the JAX backend."""
    devices = jax.local_devices()
    gpus = [device for device in devices if device.platform != "cpu"]
    memory = device_memory(gpus[0]) if gpus else None
    shared = MAX_INSTANCES if gpus and mps_obstacle() is None else 1
    return Machine(usable_cores(), memory_bytes(), len(gpus), memory, max_instances=shared)


def workload_of(graph: Graph, options: RunOptions, *, waiting: float = 0.0) -> Workload:
    """Returns the sizes of a run that its candidates depend on. `waiting` is the result of `waiting_share`."""
    loops = graph.loops
    return Workload(
        num_envs=loops.num_envs,
        num_steps=loops.num_steps,
        updates=loops.epochs * loops.num_minibatches,
        on_host=graph.host is not None,
        waiting=waiting,
        num_seeds=options.num_seeds,
        asynchronous=options.asynchronous,
        gradient_bytes=interfaces(graph)["gradients"].bytes_per_message,
    )


def list_candidates(request: SearchRequest, machine: Machine, workload: Workload) -> list[Candidate]:
    """Returns the candidates for a search request, in the order in which they should be tried.

    Raises a `UsageError` if no candidate has the values that the user has chosen.
    """
    found = select_candidates(candidates(machine, workload, request.objective), request.fixed)
    if not found:
        chosen = " ".join(f"{name}={value}" for name, value in request.fixed.items())
        raise UsageError(
            f"{chosen} matches none of the searched plans for {format_count(machine.cores, 'core')} and "
            f"{format_count(machine.gpus, 'GPU')}. "
            "hint: leave it out, or train without a search."
        )
    return found


def find_plan(
    graph_of: Callable[[int | None], Graph],
    request: SearchRequest,
    *,
    environment: dict[str, str],
    machine: Machine | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> FoundPlan:
    """Searches for the fastest plan on this machine or on `machine`, or returns the result of an earlier search.

    `graph_of` returns the graph with a given number of environments, or with the user's own number for None.
    `environment` contains the environment variables of processes that train. `say` is called with a line for each
    candidate that is tried. Raises a `UsageError` if there is no candidate, or if none can run. Raises
    `SearchStopped` after a signal, once all processes have ended.
    """
    graph_of = cache(graph_of)
    graph, machine = graph_of(None), machine or this_machine()
    file = file_for(_identity(graph, request, machine))
    if not request.fresh and (stored := read_stored(file, budget=request.budget)):
        table, plan = stored
        return FoundPlan(plan, table, is_stored=True)
    workload = workload_of(graph, request.options, waiting=waiting_share(graph))
    found = list_candidates(request, machine, workload)
    if (most := most_stepping(machine, workload)) > machine.cores:
        share, cores = f"{workload.waiting:.0%}", machine.cores
        say(
            f"steps of the environment wait for {share} of their time, so the search tries up to {most} "
            f"processes on {format_count(cores, 'core')}"
        )
    say(
        f"the search has {len(found)} candidates and takes {request.budget:g} s; it always measures one "
        "candidate, even if that takes longer"
    )
    with stop_on_signals() as stop:
        trials = ProcessTrials(
            graph_of,
            request.training.without((*DECIDED, *UNSEARCHED)),
            request.options,
            machine,
            workload,
            lambda: check_stop(stop),
            environment,
            ends_at=time.monotonic() + _measuring_seconds(request),
        )
        table = _search(found, trials, request, say)
    if table.chosen is None:
        reasons = "\n".join(f"  {row.candidate}: {row.reason}" for row in table.rows)
        raise UsageError(f"no plan could run this algorithm:\n{reasons}")
    plan = trials.plan_of(table.chosen.candidate)
    store(file, table, plan, budget=request.budget)
    return FoundPlan(plan, table, is_stored=False)


def _search(
    found: Sequence[Candidate], trials: ProcessTrials, request: SearchRequest, say: Callable[[str], None]
) -> PlanTable:
    judged = Trials(
        trials.check, trials.estimate_speed, trials.predict_memory, trials.predict_speed, trials.measure
    )
    try:
        return search(
            found,
            judged,
            budget_seconds=_measuring_seconds(request),
            memory_limit=trials.machine.memory_limit,
            say=say,
        )
    finally:
        trials.close()


def _measuring_seconds(request: SearchRequest) -> float:
    return request.budget - min(END_SECONDS, request.budget / 10)


def check_stop(stop: StopRequest) -> None:
    """Raises `SearchStopped` if a signal has arrived."""
    if stop.signal_name is not None:
        raise SearchStopped(stop.signal_name, stop.exit_code)


def _identity(graph: Graph, request: SearchRequest, machine: Machine) -> dict[str, Any]:
    """Returns everything that the result of a search depends on."""
    options = request.options
    return {
        "graph": fingerprint(graph),
        "machine": [asdict(machine), hardware()["cpu"], [device.device_kind for device in jax.local_devices()]],
        "versions": [versions(), own_commit()],
        "objective": request.objective,
        "fixed": request.fixed,
        "options": [
            *(options.num_seeds, options.unroll, options.numerics, options.asynchronous, options.checksums),
            *(options.gpu_sharing, options.reduction, options.log_every),
            *(options.checkpoint_seconds, options.checkpoint_iterations),
        ],
    }
