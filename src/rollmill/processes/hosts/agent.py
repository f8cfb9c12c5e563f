"""Runs on every host except the first: starts the workers that the coordinator requests, until the run
has ended.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rollmill.channels.errors import ConnectionLost, Damaged, TimedOut
from rollmill.core.errors import RollmillError
from rollmill.core.interruption import leave_signals_to_coordinator
from rollmill.core.membership import Membership
from rollmill.processes.framing import encode, receive_frame, send_frame
from rollmill.processes.handshake import connect_as
from rollmill.processes.jobs import Job
from rollmill.processes.local_launcher import LocalHandle, LocalLauncher
from rollmill.processes.messages import WorkerMessage

PATIENCE_SECONDS = 900.0
"""Seconds for which an agent tries to reach the coordinator, which may be compiling or restarting."""
LOOK_SECONDS = 0.2
AGAIN_SECONDS = 2.0


class NobodyCame(RollmillError):
    """Error: the coordinator's process, which has rank 0, could not be reached."""

    exit_code = 1


def job_of(rank: int) -> Job:
    """Returns the `Job` with which the agent of rank `rank` identifies itself to the coordinator."""
    return Job(f"host/{rank}", "host", rank, f"{__name__}:serve_host")


def serve_host(member: Membership, show: Callable[[str], None]) -> int:
    """Starts workers on this host when the coordinator requests them, and returns once the run has ended.

    If the connection is lost, the agent connects to the coordinator again. Raises `NobodyCame` if this fails for
    some minutes, and `Refused` if the coordinator has another secret or other code.
    """
    leave_signals_to_coordinator()
    show(f"host {member.rank} of {member.count}: waiting for the run on {member.first}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            peer, _ = connect_as(member.address, member.token, job_of(member.rank))
        except (ConnectionLost, TimedOut, Damaged, OSError):
            time.sleep(AGAIN_SECONDS)
            continue
        with peer, LocalLauncher() as launcher:
            if _Agent(peer, launcher).serve():
                return 0
        show(f"host {member.rank}: the connection to {member.first} has ended. Connecting again")
        deadline = time.monotonic() + PATIENCE_SECONDS
    raise NobodyCame(
        f"no run has listened at {member.address} for {PATIENCE_SECONDS:.0f} s. hint: look at the output of the "
        "process with rank 0."
    )


class _Agent:
    """A connection to the coordinator, and the workers that it asked for."""

    def __init__(self, peer: socket.socket, launcher: LocalLauncher) -> None:
        self._peer, self._launcher = peer, launcher
        self._workers: dict[int, LocalHandle] = {}
        self._sending = threading.Lock()

    def serve(self) -> bool:
        """Serves the coordinator's requests. Returns True if the coordinator announced the end of the run."""
        try:
            while (message := receive_frame(self._peer)) is not None:
                if message.kind == "end":
                    return True
                self._take(message.kind, message.fields)
        except (OSError, Damaged):
            pass
        return False

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        number = int(fields["number"])
        if kind == "start":
            job = Job.from_json(fields["job"])
            handle = self._launcher.start(job, fields["address"], bytes.fromhex(fields["token"]))
            self._workers[number] = handle
            threading.Thread(target=self._watch, args=(number, handle, job.name), daemon=True).start()
        elif kind == "kill" and number in self._workers:
            self._launcher.kill(self._workers[number], at_once=bool(fields["at_once"]))

    def _watch(self, number: int, handle: LocalHandle, name: str) -> None:
        """Forwards the output of a worker, and reports how it ended."""
        with os.fdopen(handle.output, "r", errors="backslashreplace") as output:
            for line in output:
                print(f"[{name}] {line}", end="", file=sys.stderr, flush=True)
        while (ended := self._launcher.exit(handle)) is None:
            time.sleep(LOOK_SECONDS)
        try:
            with self._sending:
                fields = {"number": number, "status": ended.status, "reason": ended.reason}
                send_frame(self._peer, encode(WorkerMessage("ended", fields, {})))
        except OSError:
            return
