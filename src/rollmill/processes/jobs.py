"""Describes a worker's job as data: the name of a function, and its settings."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmill.core.errors import UsageError


@dataclass(frozen=True)
class Job:
    """The job of one worker, which imports the module of `entry` and calls `function(job, control)`.

    Raises a `UsageError` if `entry` names no importable module, or if a setting has no JSON form.
    """

    name: str
    """Name of the job, unique within the run, such as `actor/2`."""

    group: str
    replica: int
    entry: str
    """The function to call, as `module:function`."""

    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the function, as any value with a JSON form."""

    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables of this worker, in addition to the coordinator's.

    They are set before JAX is imported or its backend starts. Threads share their environment, so a job with
    environment variables cannot run as a thread.
    """

    attempt: int = 0
    """Number of earlier workers that have had this job."""

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        if not module or not function or module == "__main__":
            raise UsageError(
                f"job {self.name!r} has entry={self.entry!r}, expected module:function in a module that other "
                "processes can import (not `__main__`)."
            )
        _to_json(self)

    def to_json(self) -> str:
        """Returns the job as JSON, which is sent to its worker."""
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> "Job":
        """Reads a job from the JSON that `to_json` returns."""
        return Job(**json.loads(text))


def function_of(job: Job) -> Callable[..., Any]:
    """Imports and returns the function of a job. Raises a `UsageError` if its module does not define it."""
    module, _, name = job.entry.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise UsageError(f"job {job.name!r} has entry={job.entry!r}, but module {module} has no function {name}.")
    return function


def _to_json(job: Job) -> str:
    try:
        return json.dumps(asdict(job))
    except (TypeError, ValueError) as error:
        raise UsageError(f"job {job.name!r} has settings that cannot be represented in JSON: {error}.") from error
