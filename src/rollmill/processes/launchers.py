"""The interface between a supervisor and the launcher of its processes."""

import signal
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rollmill.core.errors import RollmillError
from rollmill.processes.jobs import Job


class Exit(NamedTuple):
    """How a process ended."""

    status: int | None
    """Its exit code, or the negative number of the signal that killed it, or None where nobody knows."""
    reason: str = ""
    """The launcher's explanation, beyond the status."""
    final: RollmillError | None = None
    """The reason why no further attempt could succeed, if there is one."""


@runtime_checkable
class Launcher(Protocol):
    """Starts processes that call `serve(job, address, token)`, and ends them."""

    def start(self, job: Job, address: str, token: bytes) -> Any:
        """Asks for a process, without waiting for it, and returns a handle that the launcher knows it by."""
        ...

    def output(self, handle: Any) -> int | None:
        """Returns a descriptor to read the process's output, which the caller closes. None if there is none."""
        ...

    def exit(self, handle: Any) -> Exit | None:
        """Returns how the process ended, or None while it runs. All that it had started has ended too."""
        ...

    def kill(self, handle: Any, *, at_once: bool = True) -> None:
        """Ends the process: with SIGKILL and all that it had started, or else only by asking it with SIGTERM."""
        ...

    def abandon(self, handle: Any) -> None:
        """Drops a process on an unreachable host, because its end could not be noticed."""
        ...

    def condition(self, handle: Any) -> str:
        """Returns why the process cannot run, such as "stopped by a signal". Empty if it can or nobody knows."""
        ...

    def leaving(self, handle: Any) -> str:
        """Returns why the process has to leave its host, such as "Ray drains its node". Empty if it may stay."""
        ...

    def close(self) -> None:
        """Ends whatever still runs."""
        ...


def status_text(status: int) -> str:
    """Describes an exit status."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the kernel also sends it when memory runs out)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
