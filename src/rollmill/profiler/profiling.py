"""Profiles a run for a limited time."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, cast

import jax

from rollmill.core.bounds import Range
from rollmill.core.errors import RollmillError
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.temporary import temporary_folder
from rollmill.dataflow import Graph, State, first_learning_iteration
from rollmill.gpus.activity import GpuActivity, watched_gpus
from rollmill.profiler.assembly import profile_of
from rollmill.profiler.windows import ProfiledTraining, RecordsWorkers, Windows
from rollmill.profiling import results
from rollmill.programs.cache import names_in_cache
from rollmill.runs.options import RunOptions
from rollmill.training.sessions import Session
from rollmill.training.training import PreparedTraining, begin_training, prepare_training
from rollmill.workers.program_training import ProgramTraining
from rollmill.workers.reports import Training

REPORT_SECONDS = 0.02
"""Seconds between two reports of a run in one program. Windows begin and end at reports."""


@with_field_help
@dataclass(frozen=True)
class ProfileOptions:
    """Settings of profiling: the number and duration of time windows, and whether to calibrate again."""

    windows: Annotated[int, Range(1, 1000)] = 3
    """Number of time windows with the profiler. Each is preceded and followed by a window without it."""
    unread_windows: Annotated[int, Range(0, 1000)] = 4
    """Number of further windows with the profiler after each of these. Their events are not read. They only
    measure the duration of an iteration and, on a GPU, how long the GPU waits. Long
    iterations leave them out."""
    window_seconds: Annotated[float, Range(0.05, 600)] = 0.5
    """Shortest duration of a window without the profiler."""
    profiled_seconds: Annotated[float, Range(0.01, 60)] = 0.3
    """Shortest duration of a window with the profiler. It lasts at least one iteration."""
    calibrate: bool = False
    """Measure the machine's peak rates and the cost of an event again, instead of reading them from the cache. The
    machine should be idle."""

    def __post_init__(self) -> None:
        check_fields(self)


class NothingProfiled(RollmillError):
    """Raised if training ends before the end of the first window with the profiler."""


class ProfilingStopped(RollmillError):
    """Raised if a signal or an error ends training before all windows are complete.

    `reason` names the signal or error. `code` is the exit code, which is 128 plus the number of a signal. `found`
    is the profile of the completed windows, or None.
    """

    def __init__(self, reason: str, code: int, found: results.Profile | None) -> None:
        seen = 0 if found is None else found.iteration.windows
        when = f"after {seen} window{'s' if seen > 1 else ''}" if seen else "before a window was profiled"
        super().__init__(f"stopped {when}, by {reason}")
        self.exit_code = code
        self.profile = found


def profile(
    algorithm: Graph,
    options: RunOptions | None = None,
    *,
    how: ProfileOptions | None = None,
    imports: Sequence[str] = (),
    recipe: str | None = None,
    command: str = "",
    show: Callable[[str], None] = lambda line: None,
) -> results.Profile:
    """Trains for a limited time, and returns where the time was spent.

    The run is an ordinary run in a temporary run directory. Windows with and without the profiler alternate until
    there are enough, or until training ends.

    Args:
        algorithm: a graph, such as `rollmill.ppo(env)`. It should train for longer than all windows take together.
        options: options of the run, as for `rollmill.train`, but without a run directory.
        how: number and duration of the windows.
        imports: modules that registered the environment, network or algorithm.
        recipe: the recipe that the hyperparameters come from.
        command: the command line for profiling the run again, which reports show.
        show: prints a line for the user.

    Raises:
        UsageError: the options cannot be used.
        NothingProfiled: training ended before anything was measured.
        ProfilingStopped: a signal or an error ended training. The exception contains the profile of what was
            measured.

    Examples:
        >>> profile = rollmill.profile(rollmill.ppo("CartPole-v1", total_timesteps=500_000))
    """
    how = how or ProfileOptions()
    with temporary_folder("profile") as folder, names_in_cache():
        quiet = replace(options or RunOptions(), run_dir=folder / "run", quiet=True)
        prepared = prepare_training(algorithm, quiet, imports=imports, recipe=recipe)
        show("compiled; training")
        windows, error, code = _train(prepared, how, show)
        stopped_by = _reason(error, code) if not windows.done else None
        if not windows.profiled:
            if stopped_by is not None:
                raise ProfilingStopped(stopped_by, code, None) from error
            raise NothingProfiled(_nothing_profiled(windows))
        found = profile_of(prepared, windows, calibrate=how.calibrate, error=error, command=command)
        if stopped_by is not None:
            raise ProfilingStopped(stopped_by, code, found) from error
        return found


def _nothing_profiled(windows: Windows) -> str:
    if missing := windows.lost_workers:
        return (
            "no window was profiled, because workers were lost or did not report their recordings in time: "
            f"{', '.join(missing)}. hint: train without the profiler first, or with more --windows."
        )
    return (
        "training ended before a window was profiled. hint: it needs more environment steps, so leave "
        "--total-timesteps out"
    )


class _Trained(NamedTuple):
    windows: Windows
    error: Exception | None
    """The error that ended the training."""
    code: int
    """Exit code of the run."""


def _reason(error: Exception | None, code: int) -> str | None:
    """Returns the signal or error behind an exit code, or None if the run finished."""
    if code > 128:
        return f"{signal.Signals(code - 128).name}."
    if error is None:
        return None
    return f"an error: {error}" if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"


def _train(prepared: PreparedTraining, how: ProfileOptions, show: Callable[[str], None]) -> _Trained:
    """Trains until all windows are done."""
    windows: Windows | None = None

    @contextlib.contextmanager
    def watched(session: Session) -> Iterator[tuple[Training, State]]:
        nonlocal windows
        with session as (training, state), _activity() as activity:
            if isinstance(training, ProgramTraining):
                training.report_seconds = REPORT_SECONDS
            has_processes = prepared.spec.read_plan().place in ("processes", "mesh", "ray")
            windows = Windows(
                count=how.windows,
                unread=how.unread_windows,
                seconds=how.window_seconds,
                profiled_seconds=how.profiled_seconds,
                workers=cast(RecordsWorkers, training) if has_processes else None,
                activity=activity,
                learns_from=first_learning_iteration(prepared.algorithm),
                show=show,
            )
            with contextlib.closing(windows):
                yield ProfiledTraining(training, windows), state

    error: Exception | None = None
    try:
        code = begin_training(prepared, watch=watched).exit_code
    except Exception as ended_by:  # after any error, the measurements must not be lost
        if windows is None:
            raise
        error = ended_by
        code = error.exit_code if isinstance(error, RollmillError) else 1
    assert windows is not None, "a session that opens makes windows"
    return _Trained(windows, error, code)


def _activity() -> contextlib.AbstractContextManager[GpuActivity]:
    """Returns the driver's measurements of the GPUs, if JAX uses any."""
    return watched_gpus() if jax.default_backend() == "gpu" else contextlib.nullcontext(GpuActivity())
