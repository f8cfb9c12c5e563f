"""Starts and stops the processes of trials, and finds out how they ended."""

import os
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rollmill.core.errors import DeviceLostError
from rollmill.core.imports import only_importing
from rollmill.gpus.machine_parts import MachinePart
from rollmill.plan_search.orders import Order, PopulationOrder, start_child
from rollmill.processes.forks import Child, forks_of_this_command
from rollmill.processes.restarts import ending
from rollmill.record.signals import CAUGHT
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.spec import Trial
from rollmill.training.evolution import EvolutionRule

LOOK_SECONDS = 0.1
"""Time between two checks of running trials, in seconds."""
MAX_KILLS = 3
"""How often a trial is resumed after its process was killed."""


@dataclass
class RunningTrial:
    """A running process with one trial, or with several trials that share a program."""

    trial: Trial
    """The first trial of the process, whose log contains the output of the process."""
    process: Child
    part: int
    """Number of the part of the machine on which the process runs."""
    beside: Sequence[Trial] = ()
    """Other trials in the same program."""
    began: float = field(default_factory=time.monotonic)

    @property
    def trials(self) -> Sequence[Trial]:
        """All trials that train in this process."""
        return (self.trial, *self.beside)

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self.began


def start_trials(
    sweep: SweepDirectory, trials: Sequence[Trial], part: MachinePart, imports: Collection[str]
) -> Child:
    """Starts a process for one trial, or for several trials in one program, on its part of the machine.

    Its output goes to the first trial's log. The process may import the modules in `imports`. Raises a
    `CheckpointError` if the log or a run is a link or has another file type, and a `StorageError` if the log
    cannot be opened.
    """
    orders = [sweep.order(trial) for trial in trials]
    order = orders[0] if len(orders) == 1 else Order(together=tuple(each.trained for each in orders))
    return _start(sweep, trials, order, part, imports)


def start_population(
    sweep: SweepDirectory, members: Sequence[int], rule: EvolutionRule, part: MachinePart, imports: Collection[str]
) -> Child:
    """Starts or resumes the process of population-based training for these trials. See `start_trials`."""
    every = sweep.trials()
    trials = [every[number] for number in members]
    together = tuple(trial.request.changed({"run_dir": str(sweep.run(trial).root)}) for trial in trials)
    population = PopulationOrder(rule, str(sweep.root), tuple(members), len(every))
    return _start(sweep, trials, Order(together=together, population=population), part, imports)


def _start(
    sweep: SweepDirectory, trials: Sequence[Trial], order: Order, part: MachinePart, imports: Collection[str]
) -> Child:
    with os.fdopen(sweep.open_log(trials[0]), "ab") as log:
        return start_child(
            order,
            name=str(sweep.run(trials[0]).root),
            cores=part.cores,
            forks=forks_of_this_command(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            variables=os.environ | part.environment | only_importing(imports),
            pass_fds=part.descriptors,
        )


def how_lost(code: int) -> str | None:
    """Describes the signal or GPU error that ended a process. Returns None if the trial itself failed."""
    if code < 0 or code - 128 in CAUGHT:
        return ending(code if code < 0 else 128 - code)
    if code == DeviceLostError.exit_code:
        return "was stopped by a GPU error"
    return None
