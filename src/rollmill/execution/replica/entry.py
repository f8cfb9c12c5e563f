"""Worker entry point: builds the replica's context and runs it."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rollmill.channels import Wire
from rollmill.dataflow import Flow, Graph, Partition
from rollmill.execution.coordination.start_up import CompileClock
from rollmill.execution.processes import Control, Job, WorkerMessage
from rollmill.execution.program.compiled import unroll_for
from rollmill.execution.replica.context import ReplicaContext
from rollmill.execution.replica.loop import run
from rollmill.execution.replica.progress import ReplicaControl


def run_replica(
    job: Job,
    control: Control,
    *,
    graph: Graph,
    flow: Flow,
    partition: Partition,
    wire: Callable[[Callable[[], bool], int], Wire],
) -> None:
    """Waits for where to begin, and runs one replica of a group.

    Args:
        job: whose `settings` have the seed of the training and the steps that are compiled as one.
        control: the line to the coordinator.
        graph: of the training.
        flow: of this graph.
        partition: of this graph.
        wire: makes the wire, from what says whether to stop and the number of the beginning.
    """
    control.send("process", {"pid": os.getpid()})
    begin: WorkerMessage = control.wait("begin")
    settings: Mapping[str, Any] = job.settings
    patient = ReplicaControl(control, start_seconds=settings["start_seconds"])
    opened = wire(patient.stopping, int(begin.fields["epoch"]))
    context = ReplicaContext(
        graph=graph,
        flow=flow,
        partition=partition,
        group=next(group for group in partition.groups if group.name == job.group),
        replica=job.replica,
        wire=opened,
        control=patient,
        key=jax.random.key(np.uint32(settings["seed"])),
        seed=settings["seed"],
        first=begin.fields["first"],
        restored=begin.arrays,
        attempt=begin.fields["attempt"],
        generation=begin.fields["generation"],
        opens=begin.fields["opens"],
        unroll=settings["unroll"] or unroll_for(jax.default_backend()),
        checksums=settings["checksums"],
        max_failures=settings["max_failures"],
    )
    with CompileClock() as compiling:
        run(context._replace(compiling=compiling))
