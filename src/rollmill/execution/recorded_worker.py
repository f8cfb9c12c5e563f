"""Lets the coordinator record windows of a worker's process, while the worker does its job."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rollmill.execution.processes import Control, WorkerMessage
from rollmill.execution.protocol import (
    AbandonRecording,
    StartRecording,
    StopRecording,
    WindowRecorded,
    parse,
    send,
)
from rollmill.profiling.recording import TraceRecorder


def answer_recordings(control: Control) -> None:
    """Answers requests to record this process, from the thread that reads the coordinator's messages."""
    recorder, started_at = TraceRecorder(), 0
    ending: threading.Thread | None = None

    def start(_: WorkerMessage) -> dict[str, Any]:
        nonlocal started_at
        if ending is not None:
            ending.join()
        recorder.start()
        started_at = time.monotonic_ns()
        return {}

    def stop(message: WorkerMessage) -> dict[str, Any]:
        request: StopRecording = parse(message)
        begin, end = request.begin, request.end
        if request.host != socket.gethostname():  # whose clock says nothing about this one's
            begin, end = started_at, time.monotonic_ns()
        in_background(lambda: send(control, WindowRecorded(recorder.stop(begin, end).to_json())))
        return request._asdict()

    def abandon(_: WorkerMessage) -> dict[str, Any]:
        in_background(forget)
        return {}

    def forget() -> None:
        recorder.abandon()
        send(control, WindowRecorded(None))

    def in_background(end_recording: Callable[[], None]) -> None:
        """A trace takes seconds to collect and to read, in which other messages have to be read."""
        nonlocal ending
        ending = threading.Thread(target=end_recording, name="rollmill-recording", daemon=True)
        ending.start()

    control.answer(StartRecording.__name__, start)
    control.answer(StopRecording.__name__, stop)
    control.answer(AbandonRecording.__name__, abandon)
