"""The interface between a supervisor and the launcher of its processes."""

import signal
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rollmill.core.errors import RollmillError
from rollmill.processes.jobs import Job


class Exit(NamedTuple):
    """Describes how a worker process ended."""

    status: int | None
    """Exit code, or the negative number of the signal that killed the process. None if unknown."""
    reason: str = ""
    """The launcher's explanation, in addition to the status."""
    final: RollmillError | None = None
    """The reason why no further attempt could succeed, if there is one."""


@runtime_checkable
class Launcher(Protocol):
    """Starts processes that call `serve(job, address, token)`, and ends them."""

    def start(self, job: Job, address: str, token: bytes) -> Any:
        """Requests a process for a job without waiting for it, and returns a handle that identifies it."""
        ...

    def output(self, handle: Any) -> int | None:
        """Returns a file descriptor of the process's output, which the caller reads and closes. None if there is
        none.
        """
        ...

    def exit(self, handle: Any) -> Exit | None:
        """Returns how the process ended, or None while it or any process that it started is running."""
        ...

    def kill(self, handle: Any, *, at_once: bool = True) -> None:
        """Ends the process. With `at_once`, kills it and all processes that it has started (SIGKILL), otherwise
        asks it to end (SIGTERM).
        """
        ...

    def abandon(self, handle: Any) -> None:
        """Stops tracking a process on an unreachable host, because its end would not be noticed."""
        ...

    def condition(self, handle: Any) -> str:
        """Returns the reason why the process cannot run, such as "stopped by a signal". Returns an empty string if
        it can run or if this is unknown.
        """
        ...

    def leaving(self, handle: Any) -> str:
        """Returns the reason why the process must leave its host, such as "Ray drains its node". Returns an empty
        string if it may stay.
        """
        ...

    def close(self) -> None:
        """Ends all processes that still run."""
        ...


def status_text(status: int) -> str:
    """Describes an exit status in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the kernel also sends it when memory runs out)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
