"""Trains under a partition in threads of this process, as `rollmill.train(..., place="threads")` does."""

import contextlib
import functools
from typing import NamedTuple

import jax

from rollmill.channels import LocalBroker, MemoryWire, ScopedBroker
from rollmill.dataflow import Flow, Graph, Partition, State, check_partition, flow
from rollmill.execution.coordination.coordinator import Coordinator, MetricsRows, Saved, host_blank
from rollmill.execution.coordination.jobs import jobs_of
from rollmill.execution.processes import ThreadSupervisor
from rollmill.execution.replica import run_replica


class Held(NamedTuple):
    """What the threads of a training share."""

    graph: Graph
    flow: Flow
    partition: Partition
    broker: LocalBroker


class Trained(NamedTuple):
    """The state at the end, and the metrics of each iteration."""

    state: State
    rows: list


_held: list[Held] = []


def work(job, control):
    """A worker."""
    held = _held[job.settings["held"]]
    wire = lambda stop, epoch: MemoryWire(ScopedBroker(held.broker, str(epoch)), abandon=stop)
    run_replica(job, control, graph=held.graph, flow=held.flow, partition=held.partition, wire=wire)


def train(graph, partition, *, seed=0, on_told=lambda coordinator, told: None, begin_with=None):
    """From the beginning, or from a saved state, to the end."""
    check_partition(partition, graph.loops)
    flows, blank = _flow_and_blank(graph, seed)
    _held.append(Held(graph, flows, partition, LocalBroker()))
    settings = {"held": len(_held) - 1, "seed": seed, "unroll": 1, "checksums": True}
    settings |= {"start_seconds": 600, "max_failures": 5}
    jobs = jobs_of(partition, "group_runs:work", settings, processes=False)
    rows, states = [], []
    with contextlib.closing(ThreadSupervisor(jobs)) as workers:
        coordinator = Coordinator(
            graph,
            partition,
            workers,
            begin_with=begin_with or Saved(0, blank),
            blank=blank,
            restored=begin_with is not None,
        )
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
    return flows, host_blank(graph, flows.state, jax.random.key(seed))


_graphs = []


def _flow_and_blank(graph, seed):
    if not any(graph is known for known in _graphs):
        _graphs.append(graph)
    return _cached(next(n for n, known in enumerate(_graphs) if known is graph), seed)
