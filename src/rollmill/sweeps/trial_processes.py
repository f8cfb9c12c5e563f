"""Processes of trials: how one is started, how it ended, and how all are stopped."""

import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from rollmill.core.errors import DeviceLostError
from rollmill.core.imports import only_importing
from rollmill.gpus.machine_parts import MachinePart
from rollmill.plan_search.orders import start_child
from rollmill.processes.restarts import ending
from rollmill.record.signals import CAUGHT
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.spec import Trial


@dataclass
class RunningTrial:
    """A trial that has a process."""

    trial: Trial
    process: subprocess.Popen
    part: int
    """Number of the part of the machine that it runs on."""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the process was started."""
        return time.monotonic() - self.began


def start_trial(
    sweep: SweepDirectory, trial: Trial, part: MachinePart, imports: Collection[str]
) -> subprocess.Popen:
    """Starts the process of a trial in its part of the machine.

    Args:
        sweep: the directory.
        trial: the trial.
        part: its part of the machine.
        imports: the modules that it may import by their names.

    Raises:
        CheckpointError: a link, or something else, is in the place of its log or its run.
        StorageError: its log cannot be opened.
    """
    with os.fdopen(sweep.open_log(trial), "ab") as log:
        return start_child(
            sweep.order(trial),
            name=str(sweep.run(trial).root),
            cores=part.cores,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            variables=os.environ | part.environment | only_importing(imports),
            pass_fds=part.descriptors,
        )


def how_lost(code: int) -> str | None:
    """The way in which a process was lost by no fault of its trial, for the user; None if it failed by itself.

    A fault of one client of MPS on the GPU ends the work of all its clients there.
    """
    if code < 0 or code - 128 in CAUGHT:
        return ending(code if code < 0 else 128 - code)
    if code == DeviceLostError.exit_code:
        return "was stopped by an error of the GPU"
    return None
