"""Turns the metrics of iterations into log lines, progress, events, checkpoints and a summary."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from rollmill.algorithms.hyperparameters import SCHEDULES, scheduled_in
from rollmill.algorithms.reports import GAMES, MOMENTS, explained_variance
from rollmill.core.errors import UsageError
from rollmill.core.text import format_count
from rollmill.dataflow import COMPUTED, Graph
from rollmill.gpus.activity import GpuActivity
from rollmill.hooks import (
    CheckpointSaved,
    FailureReported,
    MetricsLogged,
    PolicyEvaluated,
    TrainingFinished,
    TrainingRewound,
    TrainingStarted,
)
from rollmill.programs.faults.locate import ALMOST_ONE, FINITE
from rollmill.record.aggregates import RowSums, SavedSums, StackedRows, Throughput, stack_rows
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.leaves import tree_digest
from rollmill.record.metrics import MetricsLog
from rollmill.record.run_directory import RunDirectory
from rollmill.record.status import Status
from rollmill.runs.changes import note_launches, note_option
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import IDENTITY, identity_of
from rollmill.training.evaluations import EvaluationProgress, PeriodicEvaluation
from rollmill.training.hook_calls import HookCalls
from rollmill.training.known_failures import TemperatureWatch
from rollmill.training.metric_counts import RETURNS, computed_shares, defined_mean, reported_names
from rollmill.training.preparing import PreparedTraining
from rollmill.training.recorded_progress import read_progress
from rollmill.training.run_episodes import ENDED, FAILED, RunEpisodes
from rollmill.workers.reports import MetricsRows

MAX_LINES = 10_000
"""Maximum number of log lines of a run, if the options do not set `log_every`."""

MAX_LINES_OF_REPLAY = 2_000
"""Maximum number of log lines of a run with a replay memory, whose iterations are many and short."""

UNSTABLE = "episodes/unstable"
OVERFLOWS = "episodes/overflows"
"""Steps in which a simulation left out contacts because a buffer was too small."""

EVALUATED = "evaluation/returns/"
"""Prefix of the mean returns of kinds of agents in an evaluation."""

HIDDEN = ("episodes/", "finite/", COMPUTED, GAMES, MOMENTS)
"""Prefixes of metrics that are not logged in their original form."""


class Run(NamedTuple):
    """A run that has ended or was stopped."""

    directory: Path
    summary: dict[str, Any]
    exit_code: int
    """Exit code: 0 if the run finished or a hook stopped it, 1 if every episode failed, and 128 plus the number of
    the signal if a signal stopped it, such as 143 after SIGTERM."""

    def __fspath__(self) -> str:
        """Returns the directory: a run can be given wherever one is expected."""
        return str(self.directory)


def open_checkpoints(run: RunDirectory, options: RunOptions) -> Checkpoints:
    """Opens the checkpoints of a run. The options determine which of them are kept."""
    return Checkpoints(run.checkpoints, keep_last=options.keep_last, keep_best=options.keep_best)


def default_log_every(graph: Graph, *, num_runs: int = 1) -> int:
    """Returns the default number of iterations per log line, for a process that trains `num_runs` runs."""
    most = MAX_LINES if graph.replay is None else MAX_LINES_OF_REPLAY
    return math.ceil(graph.loops.iterations * num_runs / most)


class _PendingLine(NamedTuple):
    """A line of the metrics that is to be written."""

    iteration: int
    metrics: Mapping[str, Any]
    episodes: float
    """Fewest episodes of a seed that its means are over."""


class Recorder:
    """Records the metrics, checkpoints and summary of a run."""

    def __init__(
        self,
        prepared: PreparedTraining,
        run: RunDirectory,
        checkpoints: Checkpoints,
        log: MetricsLog,
        gpus: GpuActivity,
        hooks: HookCalls,
        *,
        keeps_choices: bool,
    ) -> None:
        algorithm, options, display = prepared.algorithm, prepared.options, prepared.display
        self._config = run.read_config()
        self._identity = identity_of(self._config)
        self._hooks, self._evaluation, self._restored = hooks, prepared.evaluation, prepared.restored
        self._keeps_choices = keeps_choices
        self._saved_evaluations = EvaluationProgress()
        self._unannounced: CheckpointSaved | None = None
        self._run, self._algorithm, self._options = run, algorithm, options
        # The states of asynchronous environments are not known. A checkpoint without them begins them at its
        # iteration, so that schedules of parameters go on.
        is_known = prepared.spec.read_plan().partition.synchronous or algorithm.host is not None
        self._saves_environments = options.checkpoint_environments and is_known
        self._loops = algorithm.loops
        self._checkpoints, self._log, self._display, self._gpus = checkpoints, log, display, gpus
        self.episodes = RunEpisodes(options.seeds)
        self._iteration = self._saved_iteration = 0
        self._state: PyTree[Array | np.ndarray] = None
        self._earlier_seconds = 0.0
        self._began = self._saved_at = time.perf_counter()
        self._pace = Throughput()
        self._compile_seconds = self._start_seconds = 0.0
        self._reported_seconds = 0.0
        """Training time in seconds at the last report of iterations, or at a later evaluation."""
        self._each_line = options.log_every or default_log_every(algorithm)
        self._courses = list(scheduled_in(algorithm.parameters))
        self._newest_row: Mapping[str, Any] = {}
        self._sums = RowSums()
        self._saved_sums = self._sums.to_json()
        hyperparameters = algorithm.settings.get("config", {})
        self._reported: frozenset[str] | None = None
        self._temperature = TemperatureWatch(hyperparameters.get("initial_temperature", 1.0))

    def begin(self, state: PyTree[Array | np.ndarray]) -> None:
        """Continues from the restored checkpoint of the run, or saves its first checkpoint."""
        self._state = state
        if self._restored is None:
            self._note_state(0, state)
            self._save(0, state)
        else:
            self._restore(self._restored)
        self._hooks.emit(
            TrainingStarted(
                **self._at(self._iteration),
                directory=self._run.root,
                config=self._config,
                total_env_steps=self._loops.iterations * self._loops.batch_size,
                seeds=self._options.seeds,
            )
        )
        # the run stopped before this evaluation
        if self._evaluation is not None and self._evaluation.is_due(self._iteration):
            self.keep(self._iteration, state, stopping=False)

    def _restore(self, restored: Restored) -> None:
        self._iteration = self._saved_iteration = restored.iteration
        progress = read_progress(self._run, restored, seeds=len(self._options.seeds))
        self._earlier_seconds = self._reported_seconds = progress.seconds
        self.episodes.restore(progress)
        self._saved_sums = asdict(progress.unwritten)
        self._sums = RowSums(progress.unwritten)
        if self._evaluation is not None:
            self._evaluation.progress = progress.evaluations
        self._display.note(f"resumed from iteration {restored.iteration}")

    @property
    def mean_return(self) -> float | None:
        """Mean return of the latest episodes, or None if there are none yet.

        With the option `return_of`, only the agents of that kind count.
        """
        kind = self._options.return_of
        return self.episodes.mean_return if kind is None else self.episodes.kind_returns.get(kind)

    def follow_config(self) -> None:
        """Reads the run's configuration again, so that the next checkpoints contain its changes."""
        self._config = self._run.read_config()
        self._identity = identity_of(self._config)

    def take_over(self, windows: Sequence[dict[str, Any]], iteration: int) -> None:
        """Continues from `iteration` with the policy of another run, whose latest episodes are `windows`."""
        self.episodes.take_over(windows)
        self._iteration = iteration

    def started_up(self, compile_seconds: float, seconds: float) -> None:
        """Records the seconds before the first iteration, including compilation, which do not count as training
        time.
        """
        if not self._start_seconds:  # the averages continue if a lost replica starts again
            self._gpus.restart()
        self._pace.skip(seconds - self._start_seconds)
        self._compile_seconds, self._start_seconds = compile_seconds, seconds

    def keep_launches(self, launches: Mapping[str, Any]) -> None:
        """Records the kernel launches chosen by workers, unless the run continues elsewhere."""
        if self._keeps_choices:
            note_launches(self._run, launches)

    def keep_reduction(self, reduction: str) -> None:
        """Records the all-reduce of a mesh, unless the run continues elsewhere."""
        if self._keeps_choices:
            note_option(self._run, "reduction", reduction)

    def record(self, report: MetricsRows) -> int:
        """Logs the reported iterations up to the first iteration with a non-finite value.

        Returns the number of iterations completed so far. Iterations of one report are assumed to have equal
        durations.
        """
        return self.record_rows(report.first, stack_rows(report.rows, report.counts or [1] * len(report.rows)))

    def record_rows(self, first: int, blocks: Sequence[StackedRows]) -> int:
        """Logs the iterations that follow the first `first` ones, as `record` does."""
        now = self._seconds
        begin = min(self._reported_seconds, now)
        total = sum(sum(block.counts) for block in blocks)
        each = (now - begin) / max(1, total)
        speed = self._pace.after(total * self._steps_each)
        lines: list[_PendingLine] = []
        seconds_at = lambda iteration: begin + each * (iteration - first)
        self._iteration = first
        whole = all(self._add(block, speed, seconds_at, lines) for block in blocks)
        if not whole and self._sums.iterations:
            lines.append(self._next_line(speed, seconds_at(self._iteration)))
        self._write_lines(lines)
        if whole:
            self._display.update(self._status(speed))
        self._reported_seconds = now
        self._announce_checkpoint()
        self._stop_at_overflow(blocks)
        return first + total

    def _stop_at_overflow(self, blocks: Sequence[StackedRows]) -> None:
        """Raises a `UsageError` if a simulation left out contacts."""
        steps = sum(block.of(OVERFLOWS).sum() for block in blocks)
        if steps:
            options = self._config["graph"].get("environment_options", {})
            sizes = ", ".join(f"{name}={options[name]}" for name in ("contacts", "rows") if name in options)
            raise UsageError(
                f"MuJoCo Warp left out contacts or constraints in {steps:,.0f} steps up to iteration "
                f"{self._iteration}, because its buffers are too small{sizes and f' ({sizes})'}. The last "
                "checkpoint is kept. hint: double the environment's options contacts and rows, such as by "
                "--env-option rows=N."
            )

    def _add(
        self, block: StackedRows, speed: float, seconds_at: Callable[[int], float], lines: list["_PendingLine"]
    ) -> bool:
        """Adds iterations up to one that is not finite, with their lines. Returns whether all are finite."""
        finite = np.all(block.of(FINITE) > ALMOST_ONE, axis=(1, 2)).tolist()
        good = len(finite) if all(finite) else finite.index(False)
        block = block.with_others(self._courses_over(self._iteration, block.counts))
        ended = self.episodes.of_rows(block)
        for numbers, count, episodes in zip(block.numbers[:good], block.counts, ended, strict=False):
            self._iteration += count
            self.episodes.count(episodes)
            self._sums.add_numbers(block.names, numbers, iterations=count)
            if self._iteration % self._each_line == 0 or self._iteration == self._loops.iterations:
                lines.append(self._next_line(speed, seconds_at(self._iteration)))
        return good == len(finite)

    def _courses_over(self, first: int, counts: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the environment's scheduled parameters, summed over the iterations of each row."""
        courses = [(name, course) for name, course in self._courses if course.shape != "uniform"]
        if not courses:
            return {}
        done = np.arange(first, first + sum(counts)) / self._loops.iterations
        starts = list(accumulate(counts[:-1], initial=0))
        return {
            SCHEDULES + name: np.add.reduceat(np.asarray(course.at(done), np.float64), starts)
            for name, course in courses
        }

    def request_checkpoint(self) -> None:
        """Requests a checkpoint after one of the next iterations."""
        self._hooks.wants_checkpoint = True

    def wants_state(self, iteration: int) -> bool:
        """Returns whether it is time for a checkpoint or an evaluation."""
        return self.is_due(iteration) or (self._evaluation is not None and self._evaluation.is_due(iteration))

    @property
    def is_overdue(self) -> bool:
        """True if the newest checkpoint is older than `checkpoint_seconds`."""
        return time.perf_counter() - self._saved_at >= self._options.checkpoint_seconds

    def is_due(self, iteration: int) -> bool:
        """Returns whether a checkpoint is due after this iteration, or training ends there."""
        every = self._options.checkpoint_iterations
        due = self.is_overdue if every is None else iteration // every > self._saved_iteration // every
        return due or self._hooks.wants_checkpoint or iteration == self._loops.iterations

    def keep(
        self, iteration: int, state: PyTree[Array | np.ndarray], *, stopping: bool, signalled: bool = False
    ) -> None:
        """Receives the state after an iteration, evaluates its policy if an evaluation is due, and saves a
        checkpoint if one is due.

        If workers are lost later, training returns to this state. If the run is `stopping`, a checkpoint is always
        saved. If a hook stops the run, the policy is evaluated, as after the last iteration. If a signal stops the
        run (`signalled`), the evaluation is left to the resumed run.
        """
        evaluation = self._evaluation
        by_hook = stopping and not signalled and self._hooks.failure is None
        if evaluation is not None and (
            evaluation.is_new(iteration) if by_hook else evaluation.is_due(iteration) and not stopping
        ):
            self._evaluate(evaluation, iteration, state)
        self._note_state(iteration, state)
        best = evaluation is None or evaluation.progress.best_iteration == iteration
        if best or stopping or self.is_due(iteration):
            self._save(iteration, state, self._score(iteration))

    def _evaluate(self, evaluation: PeriodicEvaluation, iteration: int, state: PyTree[Array | np.ndarray]) -> None:
        """Evaluates the policy of a state, and writes down the result."""
        found = evaluation.run(iteration, state)
        line = {"seconds": self._seconds, **self.episodes.metrics(), **found}
        row = self._log.write(iteration, iteration * self._loops.batch_size, line)
        self._reported_seconds = row["seconds"]
        best = evaluation.progress.best_iteration == iteration
        of_kinds = {
            name.removeprefix(EVALUATED): mean for name, mean in found.items() if name.startswith(EVALUATED)
        }
        each = "".join(f", {name} {mean:.5g}" for name, mean in of_kinds.items() if "_seed" not in name)
        self._display.note(
            f"evaluated after {iteration * self._loops.batch_size:,} steps: mean return "
            f"{found['evaluation/return']:.5g}{' over all agents' if each else ''}{each} in "
            f"{format_count(found['evaluation/episodes'], 'episode')}"
        )
        self._hooks.emit(PolicyEvaluated(**self._at(iteration), seconds=row["seconds"], row=row, best=best))

    def _score(self, iteration: int) -> float | None:
        """Returns the mean return by which the checkpoint of an iteration is ranked."""
        if self._evaluation is not None:
            evaluated = self._evaluation.progress
            return evaluated.mean_return if evaluated.iteration == iteration else None
        # the mean of a few episodes is too noisy for a score
        return self.mean_return if self.episodes.are_full else None

    def _note_state(self, iteration: int, state: PyTree[Array | np.ndarray]) -> None:
        """Remembers the progress up to a state that the training may go back to."""
        self._state = state
        self._saved_sums = self._sums.to_json()
        self.episodes.keep()
        if self._evaluation is not None:
            self._saved_evaluations = self._evaluation.progress

    def _save(self, iteration: int, state: PyTree[Array | np.ndarray], score: float | None = None) -> None:
        metadata = {
            "env_steps": iteration * self._loops.batch_size,
            "seconds": self._seconds,
            "episodes": self.episodes.windows,
            "failures": list(self.episodes.counts),
            "unwritten": self._saved_sums,
            **({"evaluations": asdict(self._evaluation.progress)} if self._evaluation else {}),
            IDENTITY: self._identity,
        }
        self._log.flush()  # a resumed run continues after the lines that precede its checkpoint
        self._checkpoints.wait()
        self._announce_checkpoint()
        if not self._saves_environments:
            state = {name: part for name, part in vars(state).items() if name != "collector"}
        self._checkpoints.save(iteration, state, metadata=metadata, score=score)
        path = self._run.checkpoints.path / str(iteration)
        self._unannounced = CheckpointSaved(**self._at(iteration), path=path, score=score)
        self._hooks.wants_checkpoint = False
        self._saved_at, self._saved_iteration = time.perf_counter(), iteration

    def _announce_checkpoint(self) -> None:
        """Tells hooks of the newest checkpoint once it is complete."""
        if self._unannounced is not None and self._checkpoints.saved:
            event, self._unannounced = self._unannounced, None
            self._hooks.emit(event)

    def rewind(self, iteration: int) -> None:
        """Returns to the state that was saved after an iteration, and discards later metrics."""
        self._log.rewind(iteration)
        self._iteration = iteration
        self.episodes.rewind()
        self._sums = RowSums(SavedSums(**self._saved_sums))
        if self._evaluation is not None:
            self._evaluation.progress = self._saved_evaluations
        self._hooks.emit(TrainingRewound(**self._at(iteration)))

    def finish(self, *, signal_name: str | None) -> dict[str, Any]:
        """Writes the summary, prints the run's path, and calls hooks with the last event. `signal_name` names the
        signal that stopped the run, if any.
        """
        self._log.flush()
        self._announce_checkpoint()
        finished = self._iteration >= self._loops.iterations
        status = "finished" if finished else "stopped"
        summary = self._summary(status) | ({} if finished else self._cause(signal_name))
        self._run.write_summary(summary)
        self._display.close()
        if not finished:
            reason = f": {summary['stop_reason']}" if "stop_reason" in summary else ""
            self._display.note(
                f"stopped by {summary['stopped_by']} after iteration {self._iteration}{reason}. Resume with"
            )
            self._display.note(f"  {self._run.command('resume')}")
        if self._hooks.failure is None:
            self._hooks.emit(TrainingFinished(**self.place, status=status, summary=summary))
        else:
            message = str(self._hooks.failure)
            self._hooks.emit(FailureReported(**self.place, kind="hook", message=message, ends=True))
        return summary

    def _cause(self, signal_name: str | None) -> dict[str, str | None]:
        """Returns the cause of the end: a signal, a hook's request, or a hook's failure."""
        if signal_name is None and self._hooks.failure is not None:
            return {"stopped_by": "a failed hook", "error": str(self._hooks.failure)}
        if signal_name is None and self._hooks.stop is not None:
            return {"stopped_by": self._hooks.stop.hook, "stop_reason": self._hooks.stop.reason}
        return {"stopped_by": signal_name}

    @property
    def place(self) -> dict[str, int]:
        """The numbers of iterations and environment steps completed so far, as events contain them."""
        return self._at(self._iteration)

    # --- parts ---------------------------------------------------------------------------------------

    @property
    def _steps_each(self) -> int:
        """Environment steps of an iteration, over all seeds."""
        return self._loops.batch_size * len(self._options.seeds)

    @property
    def _env_steps(self) -> int:
        """Environment steps of one seed so far."""
        return self._iteration * self._loops.batch_size

    def _at(self, iteration: int) -> dict[str, int]:
        return {"iteration": iteration, "env_steps": iteration * self._loops.batch_size}

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + max(time.perf_counter() - self._began - self._start_seconds, 0.0)

    def _next_line(self, speed: float, seconds: float) -> "_PendingLine":
        """Returns the log line for the iterations since the last line, and starts the next."""
        line = _PendingLine(self._iteration, {"seconds": seconds, **self._line(speed)}, self.episodes.fewest)
        self._sums = RowSums()
        return line

    def _write_lines(self, lines: Sequence["_PendingLine"]) -> None:
        """Writes the lines of one report with a single system call, and notifies the hooks."""
        if not lines:
            return
        each = self._loops.batch_size
        rows = self._log.write_lines([(line.iteration, line.iteration * each, line.metrics) for line in lines])
        self._newest_row = rows[-1]
        for line, row in zip(lines, rows, strict=True):
            if note := self._temperature.seen(row):
                self._display.note(note)
            at = self._at(line.iteration)
            self._hooks.emit(MetricsLogged(**at, seconds=row["seconds"], row=row, episodes=line.episodes))

    def _line(self, speed: float) -> dict[str, Any]:
        """Returns the log line for the iterations since the last line, with counts of episodes and means of
        other metrics.
        """
        if self._reported is None:
            self._reported = reported_names(self._algorithm, self._state.learner)
        shares = computed_shares(self._algorithm, self._sums.names, self._reported)
        totals, means = self._sums.totals(), self._sums.means(shares)
        metrics = {name: defined_mean(value) for name, value in means.items() if not name.startswith(HIDDEN)}
        if not self.episodes.counts.ended:
            metrics |= {name: None for name in metrics if name.startswith(RETURNS)}
        games = {name: total for name, total in totals.items() if name.startswith(GAMES)}
        of_games = {name: total / totals[ENDED] if totals[ENDED] else None for name, total in games.items()}
        return {
            "steps_per_second": speed,
            **self.episodes.metrics(),
            "episode/ended": totals[ENDED],
            "episode/failed": totals.get(FAILED, 0.0),
            **({"episode/unstable": totals[UNSTABLE]} if UNSTABLE in totals else {}),
            **({"episode/overflows": totals[OVERFLOWS]} if OVERFLOWS in totals else {}),
            **of_games,
            **metrics,
            "losses/explained_variance": explained_variance(means),
            **self._gpus.recent(),
        }

    def _status(self, speed: float) -> Status:
        return Status(
            env_steps=self._env_steps * len(self._options.seeds),
            total_steps=self._loops.iterations * self._steps_each,
            steps_per_second=speed,
            episode_return=self.episodes.mean_return,
            episode_length=self.episodes.mean_length,
            seconds=self._seconds,
            row=self._newest_row,
        )

    def _summary(self, status: str) -> dict[str, Any]:
        total = self._env_steps * len(self._options.seeds)
        return {
            "status": status,
            "iterations": self._iteration,
            "env_steps": self._env_steps,
            "total_env_steps": total,
            "seconds": self._seconds,
            "compile_seconds": self._compile_seconds,
            "steps_per_second": total / max(self._seconds, 1e-9),
            **self.episodes.summary(),
            **({"return_of": self._options.return_of} if self._options.return_of else {}),
            **(self._evaluation.summary if self._evaluation else {}),
            "weights_sha256": tree_digest(self._algorithm.weights(self._state.learner)),
            **({"gpus": gpus} if (gpus := self._gpus.total()) else {}),
        }
