"""The worker's side of a worker process: its connection to the coordinator, and the call of its function."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rollmill.channels.errors import Abandoned, Damaged
from rollmill.core.process_tree import MARK, kill_family
from rollmill.core.user_frame import user_frame
from rollmill.gpus.device_errors import known_device_error
from rollmill.processes import clocks
from rollmill.processes.events import FINAL
from rollmill.processes.framing import encode, receive_frame, send_frame
from rollmill.processes.handshake import connect_as
from rollmill.processes.heartbeat import Progress
from rollmill.processes.jobs import Job, function_of
from rollmill.processes.mailbox import Mailbox, MailboxControl
from rollmill.processes.messages import NOTHING, WorkerMessage, outgoing

EXIT_ORPHANED = 3
"""Exit code of a worker whose coordinator is gone."""

MAX_DETAILS = 20_000
HANG_UP_SECONDS = 1.0
"""Maximum seconds that a worker waits for the coordinator to read its last message and hang up."""

STUCK_BEATS = 4.0
"""Number of heartbeats without progress after which a worker may write its current source line.

It does so once half of the time for a hang has passed as well.
"""


def serve(job: Job, address: str, token: bytes) -> int:
    """Does a job in this process, in its main thread, and returns the exit code.

    Raises `Refused` if the coordinator at `address` rejects this worker, and an `OSError` if there is no
    coordinator.
    """
    peer, settings = connect_as(address, token, job)
    control = SocketControl(peer)
    listening = threading.Thread(target=control.listen, name="rollmill-listen", daemon=True)
    listening.start()
    beat, hang = float(settings["heartbeat_seconds"]), float(settings["hang_seconds"])
    with control.beating(beat, stuck_seconds=max(STUCK_BEATS * beat, hang / 2)):
        last = _run(job, control)
    with contextlib.suppress(Abandoned):
        control.send_message(last)
    control.hang_up()
    listening.join(HANG_UP_SECONDS)
    peer.close()
    return 1 if last.kind == ".failed" else 0


class SocketControl(MailboxControl):
    """`Control` of a worker that runs as a process."""

    def __init__(self, peer: socket.socket) -> None:
        super().__init__(Mailbox(), Progress(threading.get_ident()))
        self._peer, self._hung_up = peer, False
        self._sending = threading.Lock()

    def send(
        self, kind: str, fields: Mapping[str, Any] = NOTHING, arrays: Mapping[str, np.ndarray] = NOTHING
    ) -> None:
        """Sends a message to the coordinator, after all messages that this worker has sent before."""
        self.send_message(outgoing(kind, fields, arrays))
        self._pulse.touch()

    def answer(self, kind: str, reply: Callable[[WorkerMessage], Mapping[str, Any]]) -> None:
        """Answers each message of a kind immediately from now on, even while the worker's main thread computes."""
        self._mailbox.answer(kind, lambda message: self.send_message(outgoing(kind, reply(message), NOTHING)))

    def send_message(self, message: WorkerMessage) -> None:
        """Sends a message of any kind, including kinds that Rollmill reserves for itself."""
        frame = encode(message)
        try:
            with self._sending:
                send_frame(self._peer, frame)
        except OSError as error:
            raise Abandoned("the coordinator has closed the connection.") from error

    def hang_up(self) -> None:
        """Stops sending messages. From then on, this process survives if the coordinator closes the connection."""
        self._hung_up = True
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def listen(self) -> None:
        """Receives the coordinator's messages, and ends this process when the coordinator is gone."""
        with contextlib.suppress(OSError, Damaged, Abandoned):
            while (message := receive_frame(self._peer)) is not None:
                if message.kind == ".stop":
                    self._mailbox.stop()
                elif message.kind == clocks.KIND:
                    self.send_message(clocks.answer(message))
                else:
                    self._mailbox.put(message)
        if not self._hung_up:
            _leave()

    @contextlib.contextmanager
    def beating(self, seconds: float, *, stuck_seconds: float) -> Iterator[None]:
        """Context manager that sends heartbeats with the calling thread's activity."""
        ended = threading.Event()
        arguments = (seconds, stuck_seconds, ended)
        thread = threading.Thread(target=self._beat, args=arguments, name="rollmill-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(seconds)

    def _beat(self, seconds: float, stuck_seconds: float, ended: threading.Event) -> None:
        with contextlib.suppress(Abandoned):
            while not _slept(seconds, stuck_seconds, ended):
                self.send_message(WorkerMessage(".beat", self._pulse.look()._asdict(), {}))


def _slept(seconds: float, stuck_seconds: float, ended: threading.Event) -> bool:
    """Sleeps between two beats, and returns whether they are to end.

    If a call holds the GIL for long, no Python thread can report it. One of C's can: it
    writes all threads' tracebacks to standard error.
    """
    faulthandler.dump_traceback_later(stuck_seconds, file=sys.__stderr__ or 2)
    try:
        return ended.wait(seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(job: Job, control: SocketControl) -> WorkerMessage:
    """Calls the job's function, and returns the last message to the coordinator."""
    try:
        control.at(f"importing {job.entry.partition(':')[0]}")
        function = function_of(job)
        control.send_message(WorkerMessage(".calling", {}, {}))
        control.at("running")
        function(job, control)
        return WorkerMessage(".finished", {}, {})
    except BaseException as error:
        if control.stopping() and isinstance(error, Abandoned):
            return WorkerMessage(".finished", {}, {})
        return _failure(error)


def _failure(error: BaseException) -> WorkerMessage:
    error = known_device_error(error) or error
    details = "".join(traceback.format_exception(error))
    if not isinstance(error, FINAL):  # the coordinator reports these errors in a sentence, without a traceback
        print(details, file=sys.stderr, flush=True)
    reason = f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]} ({user_frame(error)})"
    fields = {"reason": reason, "details": details[-MAX_DETAILS:]}
    if isinstance(error, FINAL):
        fields |= {"final": type(error).__name__, "text": str(error)}
    return WorkerMessage(".failed", fields, {})


def _leave() -> None:
    """Ends this process, and all that it started, without asking anybody."""
    if os.getsid(0) == os.getpid():
        kill_family(os.getpid(), os.environ.get(MARK, str(os.getpid())))
    os._exit(EXIT_ORPHANED)
