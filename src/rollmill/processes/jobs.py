"""A worker's job as data: a function by name, and its settings."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmill.core.errors import UsageError


@dataclass(frozen=True)
class Job:
    """The job of one worker: to import the module of `entry` and call `function(job, control)`.

    Raises a `UsageError` if `entry` names no importable module, or if a setting has no JSON form.
    """

    name: str
    """Unique within the run, such as `actor/2`."""

    group: str
    replica: int
    entry: str
    """`module:function`."""

    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the function, as any value with a JSON form."""

    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables of this worker beside the coordinator's, set before JAX is imported or its backend
    starts, whichever reads them. Threads share theirs, so a job that sets some cannot run as one."""

    attempt: int = 0
    """How many workers had this job before."""

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        if not module or not function or module == "__main__":
            raise UsageError(
                f"job {self.name!r} has entry={self.entry!r}, expected module:function in a module that other "
                "processes can import (not `__main__`)."
            )
        _to_json(self)

    def to_json(self) -> str:
        """Returns the job as JSON, to be sent to its worker."""
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> "Job":
        """Reads the job that `to_json` wrote."""
        return Job(**json.loads(text))


def function_of(job: Job) -> Callable[..., Any]:
    """Imports the function of a job. Raises a `UsageError` if its module lacks it."""
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
