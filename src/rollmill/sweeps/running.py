"""Runs the trials of a sweep in processes, several at a time. Similar trials may share a process."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rollmill.core.errors import DeviceMemoryError
from rollmill.core.interruption import CHECKPOINT_REQUEST
from rollmill.core.machine import GpuSharing
from rollmill.core.text import format_count
from rollmill.gpus.machine_parts import MachinePart, MachineParts, divide_machine
from rollmill.processes.logs import last_line
from rollmill.processes.restarts import LossCounter, end_all
from rollmill.record.run_directory import RunDirectory
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.early_stopping import EarlyStopping, describe_stop, goes_on
from rollmill.sweeps.halving import Judgement
from rollmill.sweeps.metrics import KIND_RETURNS
from rollmill.sweeps.population_based import run_population
from rollmill.sweeps.results import SweepResults
from rollmill.sweeps.shared_programs import MAX_TRIALS, Together, num_programs, trials_together
from rollmill.sweeps.spec import Trial
from rollmill.sweeps.trial_processes import LOOK_SECONDS, MAX_KILLS, RunningTrial, how_lost, start_trials


@dataclass
class _Schedule:
    """The trials that wait, those that run, and how often each was killed."""

    waiting: list[Trial]
    running: list[RunningTrial] = field(default_factory=list)
    kills: LossCounter = field(default_factory=LossCounter)
    failed: list[str] = field(default_factory=list)
    stopped: dict[str, Judgement] = field(default_factory=dict)
    """Trials that are being stopped early, with the judgement that stops them."""
    too_large: list[Trial] = field(default_factory=list)
    """Trials that ended for want of a GPU's memory, and wait until fewer run at a time."""
    without_memory: dict[str, int] = field(default_factory=dict)
    """How often trials ended so."""
    most_together: int = MAX_TRIALS
    """Maximum number of trials in one program: fewer once a program did not fit a GPU's memory."""
    alone: set[str] = field(default_factory=set)
    """Trials whose shared program has failed, so that each gets one of its own."""


def run_sweep(
    sweep: SweepDirectory,
    *,
    at_once: int | None,
    sharing: GpuSharing,
    metric: str,
    say: Callable[[str], None],
    imports: Collection[str],
    together: Together = "auto",
    also_stopped: bool = False,
) -> int:
    """Runs the trials that are neither finished nor stopped early, and returns the exit code.

    At most `at_once` trials run at a time, by default a number that depends on the machine. If a trial fails, the
    others continue. If its process is killed, the trial is resumed. Trials that ran out of GPU memory run again at
    the end, first with half the concurrency, and finally one at a time. A sampler proposes a trial when a slot is
    free. With `together`, trials that differ only in seeds and hyperparameters may share a program. With
    `also_stopped`, stopped trials continue, and early stopping is off. Trials may import the modules named in
    `imports`. `say` prints a line. On SIGINT or SIGTERM, all running trials stop with a checkpoint.

    Returns 0 if all trials finished or were stopped early, 1 if one failed, and 128 plus the number of the signal
    after a signal. Raises a `UsageError` if another process runs the sweep, if the GPUs cannot be shared as
    requested, or if the trials lack the kind of agents that `metric` names, and a `StorageError` if the table or
    the report cannot be written at the end.
    """
    if sweep.spec.evolution is not None:
        return run_population(
            sweep, at_once=at_once, sharing=sharing, metric=metric, say=say, imports=imports, together=together
        )
    with RunDirectory(sweep.root).lock(), stop_on_signals() as stop:
        if also_stopped:
            goes_on(sweep)
        schedule, results = _Schedule(sweep.unfinished()), SweepResults(sweep, metric)
        rule = sweep.spec.early_stopping
        early = EarlyStopping(sweep, rule) if rule else None
        try:
            while (open_trials := len(schedule.waiting) + sweep.remaining) and not stop.requested:
                shares = together == "auto" and early is None
                # On GPUs, one program of many trials is faster than many programs. Proposals arrive one by one.
                enough = (
                    num_programs(sweep, schedule.waiting, schedule.alone)
                    if shares and not sweep.remaining
                    else None
                )
                with divide_machine(at_once, open_trials, sharing, enough=enough) as parts:
                    total = sweep.spec.num_trials
                    ended = f"{total - open_trials} of them {'ended' if rule else 'finished'}"
                    say(f"{format_count(total, 'trial')}, {ended}; {len(parts)} at a time, {parts.note}")
                    _run_all(sweep, schedule, parts, early, stop, say, results, imports, shares=shares)
                at_once = max(parts.least, len(parts) // 2)
                schedule.waiting, schedule.too_large = schedule.too_large, []
            if schedule.without_memory:
                say(_memory_told(schedule))
        finally:
            end_all(running.process for running in schedule.running)
            results.write()
        return stop.exit_code or int(bool(schedule.failed))


def _run_all(
    sweep: SweepDirectory,
    schedule: _Schedule,
    parts: MachineParts,
    early: EarlyStopping | None,
    stop: StopRequest,
    say: Callable[[str], None],
    results: SweepResults,
    imports: Collection[str],
    *,
    shares: bool,
) -> None:
    while (schedule.waiting or schedule.running or sweep.remaining) and not stop.requested:
        free = sorted(set(range(len(parts))) - {running.part for running in schedule.running})
        for number, part in enumerate(free):
            trials = _next_together(sweep, schedule, len(free) - number) if shares else []
            trials = trials or list(islice(_next_trials(sweep, schedule, early, say), 1))
            if trials:
                schedule.running.append(_start(sweep, trials, parts.each[part], part, imports, say))
        _pass_on_request(stop, schedule)
        results.check_kind(trial for running in schedule.running for trial in running.trials)
        ended = [running for running in schedule.running if running.process.poll() is not None]
        if early:
            _stop_early(schedule, early)
        for running in ended:
            schedule.running.remove(running)
            for trial in running.trials:
                say(_outcome(sweep, schedule, running, trial, alone=len(parts) <= parts.least))
            _say_notes(results, running, say)
        results.write_if_due([trial.name for running in schedule.running for trial in running.trials])
        if not ended:
            time.sleep(LOOK_SECONDS)


def _say_notes(results: SweepResults, running: RunningTrial, say: Callable[[str], None]) -> None:
    for note in filter(None, map(results.note_on, running.trials)):
        say(note)


def _pass_on_request(stop: StopRequest, schedule: _Schedule) -> None:
    """Has all running trials save a checkpoint, if one was requested."""
    for running in schedule.running if stop.take_checkpoint_request() else ():
        running.process.send_signal(CHECKPOINT_REQUEST)


def _next_together(sweep: SweepDirectory, schedule: _Schedule, places: int) -> list[Trial]:
    """Removes trials that share a program from the queue, or none if the next trial must have its own program."""
    trials = trials_together(sweep, schedule.waiting, schedule.alone, places=places, most=schedule.most_together)
    schedule.waiting = [trial for trial in schedule.waiting if trial not in trials]
    return trials


def _start(
    sweep: SweepDirectory,
    trials: list[Trial],
    part: MachinePart,
    number: int,
    imports: Collection[str],
    say: Callable[[str], None],
) -> RunningTrial:
    for trial in trials:
        sweep.note_failure(trial, failed=False)
    process = start_trials(sweep, trials, part, imports)
    first, *others = trials
    for trial in others:
        say(f"trial {trial} starts in the program of trial {first.name}")
    say(f"trial {first} started")
    return RunningTrial(first, process, number, others)


def _next_trials(
    sweep: SweepDirectory, schedule: _Schedule, early: EarlyStopping | None, say: Callable[[str], None]
) -> Iterator[Trial]:
    """Yields the trials to start, one by one: those that wait, then proposals.

    A killed trial is judged by its metrics before it is restarted.
    """
    while schedule.waiting:
        trial = schedule.waiting.pop(0)
        if early and (judgement := early.look(trial)):
            say(f"trial {trial} was stopped early {describe_stop(judgement)}")
        else:
            yield trial
    while sweep.remaining:
        yield sweep.propose(schedule.failed)


def _stop_early(schedule: _Schedule, early: EarlyStopping) -> None:
    """Looks at all that run or have just come to their end, and stops those that are not among the best."""
    for running in schedule.running:
        if running.process.poll() not in (None, 0):  # the trial failed or was lost, which is reported instead
            continue
        judgement = early.look(running.trial)
        if judgement is not None:
            schedule.stopped[running.trial.name] = judgement
            running.process.terminate()  # has no effect on a process that has ended


def _outcome(
    sweep: SweepDirectory, schedule: _Schedule, running: RunningTrial, trial: Trial, *, alone: bool
) -> str:
    """Returns a sentence on a trial that has ended. A trial to be tried again returns to the waiting trials.

    `alone` says that no other trial shared its GPU.
    """
    code = running.process.returncode
    if sweep.is_finished(trial):
        summary = sweep.summary(trial)
        of_kinds = summary.get(KIND_RETURNS) or {}
        each = ", ".join(f"{kind} {_short(value)}" for kind, value in of_kinds.items())
        final = f"final returns {each}" if each else f"final return {_short(summary['final_return'])}"
        return f"trial {trial} finished in {running.seconds:.0f} s, {final}"
    if trial.name in schedule.stopped:
        return f"trial {trial} was stopped early {describe_stop(schedule.stopped[trial.name])}"
    last = last_line(sweep.log(running.trial))
    if running.beside and code != 0:
        return _part(schedule, running, trial, last)
    if code == DeviceMemoryError.exit_code:
        schedule.without_memory[trial.name] = schedule.without_memory.get(trial.name, 0) + 1
        if not alone:
            schedule.too_large.append(trial)
            return f"trial {trial} ran out of GPU memory. It runs again later, next to fewer trials: {last}"
    if (how := how_lost(code)) is not None:
        if schedule.kills.add(trial.name) <= MAX_KILLS:
            schedule.waiting.insert(0, trial)
            return f"trial {trial} {how}. It is being resumed."
    else:
        how = f"failed with exit code {code}"
    schedule.failed.append(trial.name)
    sweep.note_failure(trial, failed=True)
    return f"trial {trial} {how}: {last} (full log: {sweep.log(trial)})"


def _part(schedule: _Schedule, running: RunningTrial, trial: Trial, last: str) -> str:
    """Lets a trial wait again because its shared program has failed, and returns a sentence about it.

    If memory was short, it waits for a program with half the trials, and otherwise for a separate program.
    """
    schedule.waiting.append(trial)
    half = len(running.trials) // 2
    if running.process.returncode == DeviceMemoryError.exit_code and half > 1:
        schedule.most_together = min(schedule.most_together, half)
        return f"trial {trial} ran out of GPU memory. It runs again in a program of at most {half} trials: {last}"
    schedule.alone.add(trial.name)
    return f"trial {trial} continues in a program of its own, because the shared program ended: {last}"


def _memory_told(schedule: _Schedule) -> str:
    """Returns a sentence on how many trials ran out of memory, and how many of them did so even on their own."""
    times = schedule.without_memory
    lost = sum(name in times for name in schedule.failed)
    ended, total = format_count(len(times), "trial"), format_count(sum(times.values()), "time")
    ran = f"{ended} ran out of GPU memory, {total} in total"
    return f"{ran}. Next to fewer trials, {'all' if not lost else f'all but {lost}'} of them completed."


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"
