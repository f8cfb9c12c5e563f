"""Runs a sweep with population-based training, whose trials train in one process and copy each other."""

import time
from collections.abc import Callable, Collection, Sequence

from rollmill.core.errors import UsageError
from rollmill.core.interruption import CHECKPOINT_REQUEST
from rollmill.core.machine import GpuSharing
from rollmill.gpus.machine_parts import MachinePart, divide_machine
from rollmill.processes.forks import Child
from rollmill.processes.logs import last_line
from rollmill.processes.restarts import end_all
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.results import SweepResults
from rollmill.sweeps.shared_programs import Together
from rollmill.sweeps.spec import Trial
from rollmill.sweeps.trial_processes import LOOK_SECONDS, MAX_KILLS, how_lost, start_population
from rollmill.training.evolving import common_point


def run_population(
    sweep: SweepDirectory,
    *,
    at_once: int | None,
    sharing: GpuSharing,
    metric: str,
    say: Callable[[str], None],
    imports: Collection[str],
    together: Together,
) -> int:
    """Runs all trials of population-based training. See `run_sweep` for arguments, result and errors."""
    trials = sweep.trials()
    check_shares(at_once, together)
    with RunDirectory(sweep.root).lock(), stop_on_signals() as stop:
        results = SweepResults(sweep, metric)
        try:
            with divide_machine(1, 1, sharing) as parts:
                say(f"{len(trials)} trials in one program, {parts.note}")
                failed = _run(sweep, trials, parts.each[0], stop, say, results, imports)
            return stop.exit_code or int(failed)
        finally:
            results.write()


def check_shares(at_once: int | None, together: Together) -> None:
    """Raises a `UsageError` if the options keep the trials of population-based training from sharing one
    program.
    """
    if together == "off" or at_once is not None:
        raise UsageError(
            "the trials of population-based training all run at the same time in one program. hint: leave "
            "--together and --at-once out."
        )


def _run(
    sweep: SweepDirectory,
    trials: Sequence[Trial],
    part: MachinePart,
    stop: StopRequest,
    say: Callable[[str], None],
    results: SweepResults,
    imports: Collection[str],
) -> bool:
    """Runs the process of the trials, and resumes it if it is killed. Returns whether it failed."""
    rule = sweep.spec.evolution
    assert rule is not None
    kills = 0
    while sweep.unfinished() and not stop.requested:
        for trial in trials:
            sweep.note_failure(trial, failed=False)
        process = start_population(sweep, _members(sweep, trials, say), rule, part, imports)
        try:
            has_begun = lambda: any(map(sweep.has_begun, trials))
            _wait(process, stop, has_begun, lambda: _look(results, trials))
        finally:
            end_all([process])
        if stop.requested or process.returncode == 0:
            break
        how = how_lost(process.returncode)
        if how is not None and (kills := kills + 1) <= MAX_KILLS:
            say(f"the process that trains the population {how}. It is being resumed.")
            continue
        how, log = how or f"failed with exit code {process.returncode}", sweep.log(trials[0])
        say(f"the process that trains the population {how}: {last_line(log)} (full log: {log})")
        for trial in sweep.unfinished():
            sweep.note_failure(trial, failed=True)
        return True
    return False


def _look(results: SweepResults, trials: Sequence[Trial]) -> None:
    results.check_kind(trials)
    results.write_if_due([trial.name for trial in trials])


def _members(sweep: SweepDirectory, trials: Sequence[Trial], say: Callable[[str], None]) -> Sequence[int]:
    """Returns the numbers of trials that continue together. Reports trials that have continued separately."""
    point = common_point([sweep.run(trial).root for trial in trials])
    if point.iteration is None:
        for trial in trials:  # killed before all trials had a checkpoint
            sweep.trials_folder.remove(trial.name)
    if alone := [trial.name for number, trial in enumerate(trials) if number not in point.members]:
        say(f"trials that continued separately are left out, and keep their own runs: {', '.join(alone)}")
    return point.members


def _wait(process: Child, stop: StopRequest, has_begun: Callable[[], bool], look: Callable[[], None]) -> None:
    """Waits until a process ends or a stop is requested, and passes on requests for checkpoints.

    A request waits until the process has begun to train, and has something to save.
    """
    while process.poll() is None and not stop.requested:
        if stop.wants_checkpoint and has_begun() and stop.take_checkpoint_request():
            process.send_signal(CHECKPOINT_REQUEST)
        look()
        time.sleep(LOOK_SECONDS)
