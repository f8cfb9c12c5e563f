"""Trains under a partition in threads of this process, as `rollmill.train(..., place="threads")` does."""

import contextlib
import functools
from typing import NamedTuple

import jax

from rollmill.channels.broker.local import LocalBroker
from rollmill.dataflow import State, check_partition, flow
from rollmill.planning.plan import Plan
from rollmill.processes.threads import ThreadSupervisor
from rollmill.workers.coordination.coordinator import Coordinator
from rollmill.workers.coordination.jobs import jobs_of
from rollmill.workers.coordination.starts import initial_host_state
from rollmill.workers.reports import MetricsRows, Saved
from rollmill.workers.run_spec import GraphRecipe, RunSpec, WorkerSettings
from rollmill.workers.worker_entry import MODULE, share_with_threads


class Trained(NamedTuple):
    """The state at the end, and the metrics of each iteration."""

    state: State
    rows: list


def train(graph, partition, *, seed=0, on_told=lambda coordinator, told: None, begin_with=None):
    """From the beginning, or from a saved state, to the end."""
    check_partition(partition, graph.loops)
    flows, blank = _flow_and_blank(graph, seed)
    plan = Plan(partition, "threads").to_json()
    spec = RunSpec(GraphRecipe(""), plan, "cpu", seed=seed, unroll=1, checksums=True)
    rows, states = [], []
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(share_with_threads(graph, flows, LocalBroker()))
        settings = WorkerSettings(spec, shared=name).to_json()
        jobs = jobs_of(partition, f"{MODULE}:work_in_thread", settings, processes=False)
        workers = stack.enter_context(contextlib.closing(ThreadSupervisor(jobs)))
        coordinator = Coordinator(graph, spec, workers, initial=blank, restored=begin_with)
        for told in coordinator.run():
            if isinstance(told, MetricsRows):
                assert told.first == len(rows) + (begin_with.iteration if begin_with else 0)
                rows += told.rows
            if isinstance(told, Saved):
                states.append(told.state)
            on_told(coordinator, told)
    return Trained(states[-1], rows)


@functools.lru_cache(maxsize=4)
def _cached(number, seed):
    graph = _graphs[number]
    flows = flow(graph)
    return flows, initial_host_state(graph, flows.state, jax.random.key(seed))


_graphs = []


def _flow_and_blank(graph, seed):
    if not any(graph is known for known in _graphs):
        _graphs.append(graph)
    return _cached(next(n for n, known in enumerate(_graphs) if known is graph), seed)
