"""Events of a run, and the requests that hooks return.

A hook is a function that takes one event. It is called in the process that drives the run, between two iterations
and outside compiled programs, for every placement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rollmill.core.errors import UsageError

FailureKind: TypeAlias = Literal["worker", "environment", "number", "hook", "other"]


@dataclass(frozen=True)
class TrainingEvent:
    """An event of a run."""

    iteration: int
    """Iterations that were done by then."""
    env_steps: int
    """Environment steps of one seed by then."""


@dataclass(frozen=True)
class TrainingStarted(TrainingEvent):
    """Training begins, or resumes from a checkpoint of this iteration. Metrics of later iterations are void."""

    directory: Path
    """The run directory."""
    config: Mapping[str, Any]
    """The content of config.json."""
    total_env_steps: int
    """Environment steps of one seed that are planned."""
    seeds: tuple[int, ...]
    """Seeds that are trained."""


@dataclass(frozen=True)
class MetricsLogged(TrainingEvent):
    """A line of metrics.jsonl was written."""

    seconds: float
    """Time of the training so far, without its start-up and compilation."""
    row: Mapping[str, Any]
    """The line: numbers by name, None for those that are not defined."""
    episodes: float
    """Latest episodes that `episode/return` is the mean of. For several seeds it is the fewest."""


@dataclass(frozen=True)
class PolicyEvaluated(TrainingEvent):
    """The policy was evaluated, and a line with the result was written to metrics.jsonl."""

    seconds: float
    """Time of the training so far, without its start-up and compilation."""
    row: Mapping[str, Any]
    """The line, with `evaluation/return` and its like."""
    best: bool
    """True if no evaluation before had as high a mean return."""


@dataclass(frozen=True)
class CheckpointSaved(TrainingEvent):
    """A checkpoint of this iteration is complete on disk. A later checkpoint may already have replaced it."""

    path: Path
    """Its folder."""
    score: float | None
    """The mean return by which the best checkpoints are kept, or None if there is none."""


@dataclass(frozen=True)
class TrainingRewound(TrainingEvent):
    """All workers restart from this iteration, because one of them was lost. Metrics of later iterations
    are void.
    """


@dataclass(frozen=True)
class FailureReported(TrainingEvent):
    """A worker was lost or hangs, an environment or a hook failed, or a value is not finite."""

    kind: FailureKind
    """A lost or hanging worker, an environment that raised, a number that is not finite, a hook, or other."""
    message: str
    """The message that the user sees."""
    ends: bool
    """True if the training ends with it. There is no `TrainingFinished` then."""


@dataclass(frozen=True)
class TrainingFinished(TrainingEvent):
    """Training has ended or was stopped, and the summary of the run is written."""

    status: Literal["finished", "stopped"]
    summary: Mapping[str, Any]
    """The content of summary.json."""


@dataclass(frozen=True)
class Stop:
    """Requests to stop the run with a checkpoint, from which it can be resumed.

    Args:
        reason: completes the sentence "training was stopped, because ...".

    Raises:
        UsageError: the reason is empty.
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise UsageError(
                f'Stop({self.reason!r:.60}) needs a reason as a nonempty string, such as rollmill.Stop("the '
                'return no longer rises").'
            )


@dataclass(frozen=True)
class Checkpoint:
    """Requests a checkpoint after one of the next iterations."""


HookRequest: TypeAlias = Stop | Checkpoint | None
"""A hook's answer to an event, or None for no request."""

Hook: TypeAlias = Callable[[TrainingEvent], HookRequest]
"""Called with each event of a training, one at a time."""


def named(name: str, hook: Hook) -> Hook:
    """Gives a hook the name that messages use for it, and returns the hook."""
    hook.__name__ = hook.__qualname__ = name  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def name_of(hook: Any) -> str:
    """Returns the qualified name of a function, or the name of the class of another callable."""
    name = getattr(hook, "__qualname__", None)
    if name is None and isinstance(hook, partial):
        return name_of(hook.func)
    return (name or type(hook).__qualname__).replace(".<locals>", "")
