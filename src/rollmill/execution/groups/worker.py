"""What a worker does with its job: sits down in its seat, and runs its replica."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rollmill.channels import Wire
from rollmill.dataflow import Flow, Graph, Partition
from rollmill.execution.groups.replica import run
from rollmill.execution.groups.seat import Seat
from rollmill.execution.one_program import unroll_for
from rollmill.execution.workers import Control, Job, Message
from rollmill.execution.workers.messages import Seconds


class WaitingIsProgress:
    """A control whose worker is not hung while it waits in a channel: others are, if anybody is."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._note, self._expect = "working", 0.0
        self.send, self.latest, self.wait = control.send, control.latest, control.wait
        self.check, self.answer = control.check, control.answer

    def at(self, note: str, *, expect: Seconds = 0.0) -> None:
        """See `Control`."""
        self._note, self._expect = note, expect
        self._control.at(note, expect=expect)

    def stopping(self) -> bool:
        """Asked by channels while they wait."""
        self._control.at(self._note, expect=self._expect)
        return self._control.stopping()


def serve_seat(
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
    begin: Message = control.wait("begin")
    patient = WaitingIsProgress(control)
    opened = wire(patient.stopping, int(begin.fields["epoch"]))
    settings: Mapping[str, Any] = job.settings
    seat = Seat(
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
    )
    run(seat)
