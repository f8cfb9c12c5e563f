"""Trackers selected by name with `--track`. They receive events in a separate thread, and cannot end the run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Full, Queue
from threading import Thread
from types import MappingProxyType
from typing import Any, TypeAlias

from rollmill.core.errors import RollmillError, UsageError, unknown_name
from rollmill.core.imports import ImportRefused, import_named
from rollmill.core.user_frame import failed_import
from rollmill.hooks.csv_log import csv_log
from rollmill.hooks.events import (
    FailureReported,
    Hook,
    MetricsLogged,
    PolicyEvaluated,
    TrainingEvent,
    TrainingFinished,
    TrainingStarted,
    name_hook,
)
from rollmill.hooks.trackers import mlflow_log, wandb_log

TRACKERS: dict[str, Callable[[], Hook]] = {"csv": csv_log, "wandb": wandb_log, "mlflow": mlflow_log}
ONE_OF_A_PROCESS = ("wandb",)
"""Trackers that can follow only one run per process."""
MAX_WAITING = 20_000
"""Maximum number of events that wait for a slow tracker. Beyond it, the tracker receives no more events."""
MAX_SECONDS = 30.0
"""Maximum time in seconds that a run waits for its trackers at the end."""


Trackers: TypeAlias = Mapping[str, Callable[[], Hook]]


def check_trackers(names: Sequence[str], *, others: Trackers = MappingProxyType({})) -> None:
    """Raises a `UsageError` if a tracker is unknown, or if its package or function is missing.

    `others` contains additional trackers, by name.
    """
    for name in names:
        _tracker(name, others)


def trackers(
    names: Sequence[str], note: Callable[[str], None], *, others: Trackers = MappingProxyType({})
) -> list[Hook]:
    """Returns a hook for each named tracker.

    If a tracker fails, it is not called again, `note` reports this once, and training continues. `others`
    contains additional trackers, by name. Raises the errors of `check_trackers`.
    """
    return [name_hook(name, _Background(name, _tracker(name, others), note)) for name in dict.fromkeys(names)]


def _tracker(name: str, others: Trackers) -> Hook:
    if ":" in name:
        return _find_function_hook(name)
    known = {**TRACKERS, **others}
    if name not in known:
        raise unknown_name("tracker", name, known, hint="For a function of your own, use module:function.")
    return known[name]()


def _find_function_hook(name: str) -> Hook:
    """Returns a hook that calls a function with the run directory and each line of metrics."""
    module, _, attribute = name.rpartition(":")
    try:
        function = getattr(import_named(module), attribute, None)
    except ImportRefused:
        raise
    except Exception as error:  # the user's module can raise anything
        raise UsageError(failed_import(module, error)) from error
    if not callable(function):
        raise UsageError(
            f"track={name}: the module {module} has no function {attribute!r}. hint: define "
            f"{attribute}(directory, line)."
        )
    return partial(_pass_on, function, [])


def _pass_on(function: Callable[..., Any], directory: list[Any], event: TrainingEvent) -> None:
    match event:
        case TrainingStarted():
            directory[:] = [event.directory]
        case MetricsLogged() | PolicyEvaluated():
            function(*directory, dict(event.row))


class _Background:
    """Calls a hook with events in another thread."""

    def __init__(self, name: str, hook: Hook, note: Callable[[str], None]) -> None:
        self._name, self._hook, self._note = name, hook, note
        self._events: Queue[TrainingEvent | None] = Queue(MAX_WAITING)
        self._thread: Thread | None = None
        self._given_up = False

    def __call__(self, event: TrainingEvent) -> None:
        if self._given_up:
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name=f"rollmill-track-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
            if isinstance(event, TrainingFinished) or (isinstance(event, FailureReported) and event.ends):
                self._events.put_nowait(None)
                self._thread.join(MAX_SECONDS)
                if self._thread.is_alive():
                    self._give_up(f"it did not write everything within {MAX_SECONDS:.0f} s")
        except Full:
            self._give_up(f"it is {MAX_WAITING:,} lines behind")

    def _work(self) -> None:
        while not self._given_up and (event := self._events.get()) is not None:
            try:
                self._hook(event)
            except (Exception, SystemExit) as error:  # training continues, whatever the tracker raises
                kind = "" if isinstance(error, RollmillError) else f"{type(error).__name__}: "
                self._give_up(f"{kind}{error}")

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._note(f"warning: the tracker {self._name} receives no more lines, because {reason}")
