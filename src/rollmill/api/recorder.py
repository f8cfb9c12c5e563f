"""Turns the metrics of iterations into log lines, progress, checkpoints and a summary."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from rollmill.algorithms import GAMES, MOMENTS, explained_variance
from rollmill.api.options import RunOptions
from rollmill.api.saved_run import IDENTITY, identity_of
from rollmill.core.errors import CheckpointError
from rollmill.core.json_data import read_as
from rollmill.dataflow import Graph
from rollmill.execution import is_finite
from rollmill.execution.instances import GpuActivity
from rollmill.execution.reports import MetricsRows, Row
from rollmill.record import (
    Checkpoints,
    Display,
    EpisodeWindow,
    MetricsLog,
    Restored,
    RowSums,
    RunDirectory,
    SavedSums,
    Status,
    Throughput,
    tree_digest,
)

MOST_LINES = 10_000
"""Lines of metrics that a training writes where nobody says."""

MOST_LINES_OF_REPLAY = 2_000
"""The same for algorithms that learn from a replay memory, whose iterations are many and short."""

ENDED, FAILED = "episodes/ended", "episodes/failed"
HIDDEN = ("episodes/", "finite/", GAMES, MOMENTS)
"""How metrics begin that are not logged as they are."""


class Episodes(NamedTuple):
    """Episodes of a training."""

    ended: float = 0.0
    """Those that failed included."""
    failed: float = 0.0
    """Cut short because an environment raised, or its worker was lost."""


class Run(NamedTuple):
    """A training that ended or was stopped."""

    directory: Path
    summary: dict[str, Any]
    exit_code: int
    """0 where it finished, 1 where every episode failed; 129, 130 or 143 after SIGHUP, SIGINT or SIGTERM."""

    def __fspath__(self) -> str:
        """The directory: a run can be given wherever one is expected."""
        return str(self.directory)


def open_checkpoints(run: RunDirectory, options: RunOptions) -> Checkpoints:
    """The checkpoints of a run, kept as the options say."""
    return Checkpoints(run.checkpoints, keep_last=options.keep_last, keep_best=options.keep_best)


@dataclass(frozen=True)
class SavedWindow:
    """Recent episodes of one seed, as `EpisodeWindow.to_json` writes them."""

    recent: tuple[tuple[float, float, float], ...]
    best_return: float | None


@dataclass(frozen=True)
class RecorderState:
    """The recorder's part of a checkpoint's metadata."""

    seconds: float
    episodes: tuple[SavedWindow, ...]
    failures: tuple[float, float] = (0.0, 0.0)
    """Episodes that ended, and those of them that failed."""
    unwritten: SavedSums = field(default_factory=SavedSums)
    """Metrics of iterations whose line is not complete yet."""


PROGRESS = tuple(entry.name for entry in fields(RecorderState))


def read_progress(run: RunDirectory, restored: Restored, *, seeds: int) -> RecorderState:
    """The progress that a checkpoint carries.

    Raises:
        CheckpointError: naming the field, if it is not what a recorder writes.
    """
    where = f"checkpoint {restored.iteration} in {run.checkpoints.path}"
    entries = {name: part for name, part in restored.metadata.items() if name in PROGRESS}
    progress = read_as(RecorderState, entries, where=where, field="metadata", error=CheckpointError)
    if len(progress.episodes) != seeds:
        raise CheckpointError(f"{where}: metadata.episodes are of {len(progress.episodes)} seeds, not of {seeds}.")
    _check_sums(progress.unwritten, where=where, seeds=seeds)
    return progress


def _check_sums(saved: SavedSums, *, where: str, seeds: int) -> None:
    if saved.iterations < 0:
        raise CheckpointError(f"{where}: metadata.unwritten.iterations={saved.iterations} must be at least 0.")
    for name, numbers in saved.sums.items():
        if len(numbers) not in (1, seeds):
            raise CheckpointError(
                f"{where}: metadata.unwritten.sums[{name!r:.60}] is of {len(numbers)} seeds, not of {seeds}."
            )


def default_log_every(graph: Graph) -> int:
    """Iterations of a line of the log where nobody says."""
    most = MOST_LINES if graph.replay is None else MOST_LINES_OF_REPLAY
    return math.ceil(graph.loops.iterations / most)


class Recorder:
    """Writes down what a training does."""

    def __init__(
        self,
        run: RunDirectory,
        algorithm: Graph,
        options: RunOptions,
        checkpoints: Checkpoints,
        log: MetricsLog,
        display: Display,
        gpus: GpuActivity,
    ) -> None:
        self._identity = identity_of(run.read_config())
        self._run, self._algorithm, self._options = run, algorithm, options
        self._loops = algorithm.loops
        self._checkpoints, self._log, self._display, self._gpus = checkpoints, log, display, gpus
        self._windows = [EpisodeWindow() for _ in options.seeds]
        self._saved_windows = [window.to_json() for window in self._windows]
        self._iteration = self._saved_iteration = 0
        self._state: PyTree[Array | np.ndarray] = None
        self._earlier_seconds = 0.0
        self._began = self._saved_at = time.perf_counter()
        self._pace = Throughput()
        self._compile_seconds = self._start_seconds = 0.0
        self._episodes = self._saved_episodes = Episodes()
        self._each_line = options.log_every or default_log_every(algorithm)
        self._sums = RowSums()
        self._saved_sums = self._sums.to_json()

    def begin(self, restored: Restored | None, state: PyTree[Array | np.ndarray]) -> None:
        """Goes on from a checkpoint, or saves the first one."""
        self._state = state
        if restored is None:
            self.save(0, state)
            return
        self._iteration = self._saved_iteration = restored.iteration
        progress = read_progress(self._run, restored, seeds=len(self._windows))
        self._earlier_seconds = progress.seconds
        self._saved_windows = [asdict(window) for window in progress.episodes]
        self._windows = [EpisodeWindow.from_json(saved) for saved in self._saved_windows]
        self._episodes = self._saved_episodes = Episodes(*progress.failures)
        self._saved_sums = asdict(progress.unwritten)
        self._sums = RowSums(progress.unwritten)
        self._display.note(f"resumed from iteration {restored.iteration}")

    def started_up(self, compile_seconds: float, seconds: float) -> None:
        """Notes how long it took until the training began, which is no part of the time that it takes.

        Args:
            compile_seconds: while programs were compiled.
            seconds: those included.
        """
        if not self._start_seconds:  # a replica that was replaced starts later, and the averages go on
            self._gpus.restart()
        self._pace.skip(seconds - self._start_seconds)
        self._compile_seconds, self._start_seconds = compile_seconds, seconds

    @property
    def every_episode_failed(self) -> bool:
        """Whether no episode that ended did so by itself, because its environment failed each time."""
        return self._episodes.failed > 0 and self._episodes.failed >= self._episodes.ended

    def record(self, report: MetricsRows) -> int:
        """Logs iterations, up to one that is not finite; returns the number of iterations done so far."""
        counts = report.counts or [1] * len(report.rows)
        speed = self._pace.after(sum(counts) * self._steps_each)
        for done, row, count in zip(accumulate(counts, initial=report.first), report.rows, counts, strict=False):
            if not is_finite(row):
                if self._sums.iterations:
                    self._write_line(speed)
                break
            self._iteration = done + count
            self._count_episodes(row)
            self._sums.add(row, iterations=count)
            if self._iteration % self._each_line == 0 or self._iteration == self._loops.iterations:
                self._write_line(speed)
        else:
            self._display.update(self._status(speed))
        return report.first + sum(counts)

    def is_due(self, iteration: int) -> bool:
        """Whether it is time for a checkpoint, or the training ends here."""
        every = self._options.checkpoint_iterations
        if every is not None:
            due = iteration // every > self._saved_iteration // every
        else:
            due = time.perf_counter() - self._saved_at >= self._options.checkpoint_seconds
        return due or iteration == self._loops.iterations

    def save(self, iteration: int, state: PyTree[Array | np.ndarray]) -> None:
        """Saves a checkpoint."""
        self._state = state
        self._saved_windows = [window.to_json() for window in self._windows]
        self._saved_sums = self._sums.to_json()
        metadata = {
            "env_steps": iteration * self._loops.batch_size,
            "seconds": self._seconds,
            "episodes": self._saved_windows,
            "failures": list(self._episodes),
            "unwritten": self._saved_sums,
            IDENTITY: self._identity,
        }
        self._saved_episodes = self._episodes
        full = all(window.full for window in self._windows)  # the mean of one episode is no score
        score = _mean(self._returns) if full else None
        self._checkpoints.save(iteration, state, metadata=metadata, score=score)
        self._saved_at, self._saved_iteration = time.perf_counter(), iteration

    def rewind(self, iteration: int) -> None:
        """Goes back to the state that was saved after this iteration, because the run does."""
        self._log.rewind(iteration)
        self._iteration = iteration
        self._windows = [EpisodeWindow.from_json(saved) for saved in self._saved_windows]
        self._episodes = self._saved_episodes
        self._sums = RowSums(SavedSums(**self._saved_sums))

    def finish(self, *, stopped_by: str | None) -> dict[str, Any]:
        """Writes the summary and says where the run is."""
        finished = self._iteration >= self._loops.iterations
        summary = self._summary("finished" if finished else "stopped")
        self._run.write_summary(summary)
        self._display.close()
        if not finished:
            self._display.note(f"stopped by {stopped_by} after iteration {self._iteration}; go on with")
            self._display.note(f"  {self._run.command('resume')}")
        return summary

    # --- parts ---------------------------------------------------------------------------------------

    @property
    def _steps_each(self) -> int:
        """Environment steps of an iteration, over all seeds."""
        return self._loops.batch_size * len(self._windows)

    @property
    def _env_steps(self) -> int:
        """Environment steps of one seed so far."""
        return self._iteration * self._loops.batch_size

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + max(time.perf_counter() - self._began - self._start_seconds, 0.0)

    def _count_episodes(self, row: Row) -> None:
        ended, failed = float(np.sum(row[ENDED])), float(row.get(FAILED, 0.0))
        self._episodes = Episodes(self._episodes.ended + ended, self._episodes.failed + failed)
        names = (ENDED, "episodes/return_sum", "episodes/length_sum")
        for window, sums in zip(
            self._windows, zip(*(np.ravel(row[name]) for name in names), strict=True), strict=True
        ):
            window.add(*map(float, sums))

    @property
    def _returns(self) -> list[float | None]:
        return [window.mean_return for window in self._windows]

    def _write_line(self, speed: float) -> None:
        self._log.write(self._iteration, self._env_steps, self._line(speed))
        self._sums = RowSums()

    def _line(self, speed: float) -> dict[str, Any]:
        """The line of the iterations since the last one: episodes are counted, other metrics are means."""
        totals, means = self._sums.totals(), self._sums.means()
        metrics = {name: float(np.mean(value)) for name, value in means.items() if not name.startswith(HIDDEN)}
        games = {name: total for name, total in totals.items() if name.startswith(GAMES)}
        shares = {name: total / totals[ENDED] if totals[ENDED] else None for name, total in games.items()}
        each = {f"episode/return_seed{s}": r for s, r in zip(self._options.seeds, self._returns, strict=True)}
        return {
            "seconds": self._seconds,
            "steps_per_second": speed,
            "episode/return": _mean(self._returns),
            "episode/length": _mean([window.mean_length for window in self._windows]),
            "episode/ended": totals[ENDED],
            "episode/failed": totals.get(FAILED, 0.0),
            **(each if len(each) > 1 else {}),
            **shares,
            **metrics,
            "losses/explained_variance": explained_variance(means),
            **self._gpus.recent(),
        }

    def _status(self, speed: float) -> Status:
        seeds = len(self._windows)
        return Status(
            env_steps=self._env_steps * seeds,
            total_steps=self._loops.iterations * self._steps_each,
            steps_per_second=speed,
            episode_return=_mean(self._returns),
            episode_length=_mean([window.mean_length for window in self._windows]),
        )

    def _summary(self, status: str) -> dict[str, Any]:
        weights = self._algorithm.weights(self._state.learner)
        best = [window.best for window in self._windows]
        return {
            "status": status,
            "iterations": self._iteration,
            "env_steps": self._env_steps,
            "total_env_steps": self._env_steps * len(self._windows),
            "seconds": self._seconds,
            "compile_seconds": self._compile_seconds,
            "steps_per_second": self._env_steps * len(self._windows) / max(self._seconds, 1e-9),
            "failures": int(self._episodes.failed),
            "final_return": _mean(self._returns),
            "best_return": _mean(best),
            "weights_sha256": tree_digest(weights),
            **({"gpus": gpus} if (gpus := self._gpus.total()) else {}),
            **(self._over_seeds(best) if len(best) > 1 else {}),
        }

    def _over_seeds(self, best: list[float | None]) -> dict[str, Any]:
        known = [value for value in self._returns if value is not None]
        return {
            "seeds": list(self._options.seeds),
            "final_return_per_seed": self._returns,
            "best_return_per_seed": best,
            "final_return_std": float(np.std(known)) if known else None,
            "final_return_min": min(known, default=None),
            "final_return_max": max(known, default=None),
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
