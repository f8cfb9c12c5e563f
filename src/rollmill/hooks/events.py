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
    """Base class of the events of a run, which hooks receive."""

    iteration: int
    """Number of iterations completed when the event happened."""
    env_steps: int
    """Number of environment steps of one seed completed when the event happened."""


@dataclass(frozen=True)
class TrainingStarted(TrainingEvent):
    """Training begins, or resumes from a checkpoint of this iteration. Metrics of later iterations are void."""

    directory: Path
    """The run directory."""
    config: Mapping[str, Any]
    """The content of config.json at this time. Kernels that workers choose are added to the file later."""
    total_env_steps: int
    """Number of planned environment steps of one seed."""
    seeds: tuple[int, ...]
    """The seeds that the run trains."""


@dataclass(frozen=True)
class MetricsLogged(TrainingEvent):
    """A line of metrics.jsonl was written."""

    seconds: float
    """Duration of the run so far in seconds, without start-up and compilation."""
    row: Mapping[str, Any]
    """The line of metrics.jsonl: values by name, or None for metrics that are not defined."""
    episodes: float
    """Number of latest episodes that `episode/return` averages over, the smallest of all seeds."""


@dataclass(frozen=True)
class PolicyEvaluated(TrainingEvent):
    """The policy was evaluated, and a line with the result was written to metrics.jsonl."""

    seconds: float
    """Duration of the run so far in seconds, without start-up and compilation."""
    row: Mapping[str, Any]
    """The line of metrics.jsonl with the result, such as `evaluation/return`."""
    best: bool
    """True if no earlier evaluation had a higher mean return. With the option `return_of`, only the agents of that
    kind count."""


@dataclass(frozen=True)
class CheckpointSaved(TrainingEvent):
    """A checkpoint of this iteration is complete on disk. A later checkpoint may already have replaced it."""

    path: Path
    """Path of the checkpoint's folder."""
    score: float | None
    """Mean return by which the best checkpoints are selected, or None if there is none yet. See `return_of`."""


@dataclass(frozen=True)
class TrainingRewound(TrainingEvent):
    """All workers restart from this iteration, because one was lost. Metrics of later iterations are void."""


@dataclass(frozen=True)
class FailureReported(TrainingEvent):
    """A worker was lost or hangs, an environment or a hook failed, or a value is not finite."""

    kind: FailureKind
    """What failed: a worker (lost or hung), an environment, a non-finite number, a hook, or something else."""
    message: str
    """The message shown to the user."""
    ends: bool
    """True if training ends because of the failure. No `TrainingFinished` follows."""


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
"""What a hook returns: a request, or None."""

Hook: TypeAlias = Callable[[TrainingEvent], HookRequest]
"""A function that is called with each event of a run, one at a time."""


def name_hook(name: str, hook: Hook) -> Hook:
    """Gives a hook the name that messages use for it, and returns the hook."""
    hook.__name__ = hook.__qualname__ = name  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def hook_name(hook: Any) -> str:
    """Returns the qualified name of a function, or the name of the class of another callable."""
    name = getattr(hook, "__qualname__", None)
    if name is None and isinstance(hook, partial):
        return hook_name(hook.func)
    return (name or type(hook).__qualname__).replace(".<locals>", "")
