"""Lets the coordinator record windows of a worker's process for the profiler, while the worker does its job."""

import threading
from collections.abc import Callable
from typing import Any

from rollmill.processes.control import Control
from rollmill.processes.messages import WorkerMessage
from rollmill.profiling.recording import TraceRecorder
from rollmill.workers.protocol import AbandonRecording, StartRecording, StopRecording, WindowRecorded, parse, send


def answer_recordings(control: Control) -> None:
    """Answers requests to record this process, in the thread that reads the coordinator's messages."""
    recordings = _Recordings(control)
    control.answer(StartRecording.__name__, recordings.start)
    control.answer(StopRecording.__name__, recordings.stop)
    control.answer(AbandonRecording.__name__, recordings.abandon)


class _Recordings:
    """The recordings of this process, one at a time."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._recorder = TraceRecorder()
        self._ending: threading.Thread | None = None

    def start(self, _: WorkerMessage) -> dict[str, Any]:
        """Begins a recording after the previous one has ended."""
        if self._ending is not None:
            self._ending.join()
        self._recorder.start()
        return {}

    def stop(self, message: WorkerMessage) -> dict[str, Any]:
        """Ends the recording, and sends the sums of the window that the coordinator names."""
        request: StopRecording = parse(message)
        self._in_background(lambda: self._send_window(*request))
        return request._asdict()

    def abandon(self, message: WorkerMessage) -> dict[str, Any]:
        """Ends the recording, discards its events, and confirms."""
        request: AbandonRecording = parse(message)
        self._in_background(lambda: self._forget(request.number))
        return request._asdict()

    def _in_background(self, end_recording: Callable[[], None]) -> None:
        """Ends a recording in a thread: collecting a trace takes seconds in which other messages arrive."""
        self._ending = threading.Thread(target=end_recording, name="rollmill-recording", daemon=True)
        self._ending.start()

    def _send_window(self, number: int, begin: int, end: int) -> None:
        # A worker that started after the recording began has no window to send.
        window = self._recorder.stop(begin, end).to_json() if self._recorder.is_recording else None
        send(self._control, WindowRecorded(number, window))

    def _forget(self, number: int) -> None:
        self._recorder.abandon()
        send(self._control, WindowRecorded(number, None))
