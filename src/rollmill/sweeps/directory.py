"""The directory of a sweep, which contains ordinary runs with different options and the files of the sweep.

    sweep.json             the request, which never changes
    proposals.json         values that a sampler has proposed
    early_stopping.json    results at rungs, and the trials that were stopped there
    failures.json          trials that failed, until they are tried again
    trials/                a run and a log for each trial
    table.csv              the results as a table
    report.html            the results as a page

All other information about a trial is read from its run, so a killed sweep continues from its runs.
"""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError, StorageError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.json_data import writable
from rollmill.core.schema import read_as
from rollmill.core.text import check_is_text
from rollmill.plan_search.orders import Order
from rollmill.record.json_files import read_json, write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.sweeps.files import (
    FAILED,
    FAILURES,
    FINISHED,
    PROPOSALS,
    RUNNING,
    SPECIFICATION,
    STOPPED_EARLY,
    STOPPING,
    TABLE,
    TRIALS,
    UNFINISHED,
)
from rollmill.sweeps.halving import HalvingState, Judgement
from rollmill.sweeps.metrics import TRIAL_RESULTS, columns_of_kinds, extra_columns, finite, is_of_kind, result_of
from rollmill.sweeps.proposals import SAMPLERS, PastTrial, propose
from rollmill.sweeps.ranking import OVER_SEEDS, SEED, rank_rows
from rollmill.sweeps.spec import SweepSpec, Trial, text_of
from rollmill.training.request import TrainingRequest, default_config

NORMALIZE = "normalize_observations"
MAX_BYTES = 64 * 2**20
"""Maximum size of a file of a sweep. With 100,000 trials and five options, a file has 13 million bytes."""


@dataclass(frozen=True)
class _Proposals:
    points: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class _Stopping:
    rungs: dict[str, dict[str, float]]
    stopped: dict[str, Judgement]
    ended: bool


@dataclass(frozen=True)
class _Failures:
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepDirectory:
    """The files of a sweep, and the outcomes of its trials."""

    root: Path
    spec: SweepSpec

    @classmethod
    def create(cls, root: Path, spec: SweepSpec) -> "SweepDirectory":
        """Creates the directory of a new sweep.

        Raises a `UsageError` if the directory already contains other files, and a `StorageError` if it cannot be
        written.
        """
        check_is_text("--sweep-dir", root)
        if (root / SPECIFICATION).exists():
            raise UsageError(f"{root} already contains a sweep. hint: `rollmill sweep --resume {root}`.")
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is a file. hint: choose another --sweep-dir.")
        if root.exists() and any(root.iterdir()):
            raise UsageError(
                f"{root} is not empty and does not contain a sweep. hint: choose another --sweep-dir."
            )
        try:
            Folder(root).make()
            made = Folder(root).inner(TRIALS).make_new()
        except OSError as error:
            raise UsageError(
                f"{root} cannot be created: {error.strerror or error}. hint: choose another --sweep-dir."
            ) from error
        if not made:
            raise UsageError(f"another process is creating a sweep in {root}. hint: choose another --sweep-dir.")
        write_json(Folder(root), SPECIFICATION, spec.to_json())
        return cls(root, spec)

    @classmethod
    def open(cls, root: Path) -> "SweepDirectory":
        """Opens the directory of an existing sweep.

        Raises a `UsageError` if the directory is not a sweep, and a `CheckpointError` if one of its files is
        damaged.
        """
        if not root.is_dir() or not Folder(root).has(SPECIFICATION):
            raise UsageError(f"{root} is not a sweep: it does not contain {SPECIFICATION}.")
        sweep = cls(root, _read_specification(root))
        sweep.trials()
        if not sweep.trials_folder.is_folder():
            raise CheckpointError(f"{sweep.trials_folder.path} is missing, or is a link or a file.")
        sweep.stopping()
        sweep.failed()
        return sweep

    def trials(self) -> list[Trial]:
        """Returns the trials so far, in the order in which they were listed or proposed.

        Raises a `CheckpointError` if their values are damaged.
        """
        points, file = self.spec.points, SPECIFICATION
        if self.spec.sampler is not None:
            points, file = self._read_proposals(), PROPOSALS
        try:
            return self.spec.trials(points)
        except (UsageError, ValueError) as error:
            raise CheckpointError(f"{self.root / file} is damaged: {error}") from error

    @property
    def remaining(self) -> int:
        """Number of trials that a sampler has not proposed yet."""
        return 0 if self.spec.sampler is None else max(0, self.spec.num_trials - len(self._read_proposals()))

    def propose(self, failed: Collection[str]) -> Trial:
        """Returns the next trial of a sampler, and records it before it begins. `failed` names the failed
        trials.
        """
        past = [self._past(trial, failed) for trial in self.trials()]
        point = propose(self.spec.axes, past, sampler=self.spec.sampler or SAMPLERS[0], seed=self.spec.seed)
        points = (*self._read_proposals(), tuple(point[option] for option in self.spec.options_varied))
        write_json(Folder(self.root), PROPOSALS, {"points": writable(points)})
        return self.trials()[-1]

    def stopping(self) -> HalvingState:
        """Reads the results at rungs and the trials that were stopped early.

        Raises a `CheckpointError` if the file is damaged.
        """
        if not Folder(self.root).has(STOPPING):
            return HalvingState()
        read = _read(self.root, STOPPING, _Stopping)
        if not all(steps.isdecimal() for steps in read.rungs):
            raise CheckpointError(f"{self.root / STOPPING} is damaged: a rung is not a number of steps.")
        return HalvingState({int(steps): found for steps, found in read.rungs.items()}, read.stopped, read.ended)

    def write_stopping(self, state: HalvingState) -> None:
        """Writes the results at rungs and the trials that were stopped early."""
        write_json(Folder(self.root), STOPPING, asdict(state))

    def failed(self) -> frozenset[str]:
        """Returns the names of trials that failed and have not been tried again.

        Raises a `CheckpointError` if the file is damaged.
        """
        there = Folder(self.root).has(FAILURES)
        return frozenset(_read(self.root, FAILURES, _Failures).trials if there else ())

    def note_failure(self, trial: Trial, *, failed: bool) -> None:
        """Records that a trial failed, or that it is being tried again."""
        before = self.failed()
        after = before | {trial.name} if failed else before - {trial.name}
        if after != before:
            write_json(Folder(self.root), FAILURES, asdict(_Failures(tuple(sorted(after)))))

    def run(self, trial: Trial) -> RunDirectory:
        """Returns the run directory of a trial, which need not exist yet."""
        return RunDirectory(self.root / TRIALS / trial.name)

    @property
    def trials_folder(self) -> Folder:
        """The folder with the runs and logs of all trials."""
        return Folder(self.root).inner(TRIALS)

    def log(self, trial: Trial) -> Path:
        """Returns the path of the file with the output of a trial's process."""
        return self.root / TRIALS / f"{trial.name}.log"

    def open_log(self, trial: Trial) -> int:
        """Opens the file with the output of a trial's process for appending, and returns its descriptor.

        Raises a `CheckpointError` if the file is a link or not a regular file, and a `StorageError` if it cannot
        be opened.
        """
        try:
            return self.trials_folder.open_to_append(self.log(trial).name)
        except OSError as error:
            raise StorageError(f"{self.log(trial)} cannot be opened: {error.strerror or error}.") from error

    def summary(self, trial: Trial) -> dict[str, Any]:
        """Returns the summary of a trial's run. It is empty if the run has not ended or the summary cannot be
        read.
        """
        try:
            return self.run(trial).read_summary() or {}
        except CheckpointError:
            return {}

    def is_finished(self, trial: Trial) -> bool:
        """Returns whether a trial has trained for all of its steps or reached its target return."""
        return _has_ended(self.summary(trial))

    def unfinished(self) -> list[Trial]:
        """Returns the trials so far that are neither finished nor stopped early."""
        stopped = self.stopping().stopped
        return [trial for trial in self.trials() if not (trial.name in stopped or self.is_finished(trial))]

    def has_begun(self, trial: Trial) -> bool:
        """Returns whether a trial has a run directory, possibly an incomplete one."""
        return self.trials_folder.has(trial.name)

    def order(self, trial: Trial) -> Order:
        """Returns the order to begin a trial, or to resume it if it has a checkpoint.

        Raises a `CheckpointError` if the trial's run directory is a link or a file, and a `StorageError` if the
        remains of a run without a checkpoint cannot be deleted.
        """
        run, trials = self.run(trial), self.trials_folder
        if any(name[:1].isdecimal() for name in trials.inner(trial.name).inner("checkpoints").kinds()):
            return Order(resume=str(run.root), track=trial.request.options.track)
        try:
            trials.remove(trial.name)  # the trial was killed before its first checkpoint
        except OSError as error:
            raise StorageError(f"{run.root} cannot be deleted: {error.strerror or error}.") from error
        return Order(train=trial.request.changed({"run_dir": str(run.root)}))

    def rows(self, metric: str, *, running: Collection[str] = ()) -> list[dict[str, Any]]:
        """Returns a table row with values and results for each trial, sorted by `metric`, the largest first.

        Trials without a result come last. If a trial trains several seeds in one program, each seed has a row. If
        a sweep varies seeds, rows are sorted by the mean over the seeds of each configuration (`rank_rows`). The
        row of a `running` trial has no results, because recorded results would come from an earlier stop.
        """
        rows, stopped, failed = [], self.stopping().stopped, self.failed()
        trials = self.trials()
        summaries = {trial.name: {} if trial.name in running else self.summary(trial) for trial in trials}
        columns = (*TRIAL_RESULTS, *columns_of_kinds(summaries.values(), metric))
        for trial in trials:
            summary = summaries[trial.name]
            if trial.name in running:
                status = RUNNING
            elif _has_ended(summary):  # it had ended before it was stopped early
                status = FINISHED
            elif trial.name in stopped:
                status = STOPPED_EARLY
            else:
                status = FAILED if trial.name in failed else summary.get("status", UNFINISHED)
            for point, results in _of_each_seed(trial, summary):
                numbers = {name: result_of(results, name) for name in columns}
                rows.append({"trial": trial.name, **point, "status": status, **numbers})
        return rank_rows(rows, self.spec.options_varied, metric)

    def write_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of the table to table.csv. Raises a `StorageError` if the file cannot be written."""
        text = io.StringIO(newline="")
        more = [*extra_columns(rows), *(OVER_SEEDS if SEED in self.spec.options_varied else ())]
        writer = csv.DictWriter(text, ["trial", *self.spec.options_varied, "status", *TRIAL_RESULTS, *more])
        writer.writeheader()
        varied = self.spec.options_varied
        writer.writerows({**row, **{name: text_of(row[name]) for name in varied}} for row in rows)
        try:
            with Folder(self.root).replacing(TABLE) as file:
                file.write(text.getvalue().encode())
        except OSError as error:
            raise StorageError(f"{self.root / TABLE} cannot be written: {error.strerror or error}.") from error

    def _read_proposals(self) -> tuple[tuple[Any, ...], ...]:
        return _read(self.root, PROPOSALS, _Proposals).points if Folder(self.root).has(PROPOSALS) else ()

    def _past(self, trial: Trial, failed: Collection[str]) -> PastTrial:
        summary, stopped = self.summary(trial), self.stopping().stopped
        result, steps = result_of(summary, self.spec.metric), int(finite(summary.get("env_steps")) or 0)
        if _has_ended(summary):
            return PastTrial(trial.point, "finished", result, steps)
        if (judgement := stopped.get(trial.name)) is not None:
            if result is None and (self.spec.metric == "final_return" or is_of_kind(self.spec.metric)):
                # It was killed before it could write a summary.
                result, steps = judgement.result, judgement.steps
            return PastTrial(trial.point, "stopped", result, steps)
        return PastTrial(trial.point, "failed" if trial.name in failed else "running")


def _has_ended(summary: Mapping[str, Any]) -> bool:
    return summary.get("status") == FINISHED or "stop_reason" in summary


def _read_specification(root: Path) -> SweepSpec:
    """Returns the description of a sweep. Trials of one that began with other defaults keep those."""
    described = read_json(Folder(root), SPECIFICATION, limit=MAX_BYTES)
    if "options" in described:
        raise CheckpointError(
            f"{root / SPECIFICATION} was written by Rollmill 0.1, in a format that this version cannot read. "
            "hint: resume the sweep with Rollmill 0.1, or start a new one."
        )
    spec = _read(root, SPECIFICATION, SweepSpec)
    return spec if "defaults" in described else replace(spec, request=_without_statistics(spec.request))


def _without_statistics(request: TrainingRequest) -> TrainingRequest:
    """Returns the PPO request with `normalize_observations` off, unless it sets the option."""
    if request.algorithm != "ppo" or NORMALIZE in request.settings:
        return request
    if getattr(default_config(request.algorithm, request.recipe), NORMALIZE) is not None:
        return request
    return request.changed({NORMALIZE: False})


def _read(root: Path, name: str, kind: Any) -> Any:
    described = read_json(Folder(root), name, limit=MAX_BYTES)
    try:
        return read_as(kind, described, where=str(root / name), error=CheckpointError)
    except UsageError as error:  # the dataclass's own checks
        raise CheckpointError(f"{root / name} is damaged: {error}") from error


def _of_each_seed(trial: Trial, summary: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Values and results by seed of a trial, or of an ungrouped trial."""
    if (seeds := trial.seeds) is None:
        return [(trial.point, summary)]
    each = []
    for index, seed in enumerate(seeds):
        results = dict(summary)
        for name in ("final_return", "best_return"):
            known = summary.get(f"{name}_per_seed")
            if isinstance(known, list) and len(known) == len(seeds):
                results[name] = known[index]
        each.append((trial.point | {"seed": seed}, results))
    return each
