"""Lets the coordinator record windows of a worker's process, while the worker does its job."""

import socket
import threading
import time
from typing import Any

from rollmill.execution.processes import Control, WorkerMessage
from rollmill.execution.protocol import StartRecording, StopRecording, WindowRecorded, parse, send
from rollmill.profiling.recording import TraceRecorder


def answer_recordings(control: Control) -> None:
    """Answers requests to record this process, from the thread that reads the coordinator's messages."""
    recorder, started_at = TraceRecorder(), 0

    def start(_: WorkerMessage) -> dict[str, Any]:
        nonlocal started_at
        recorder.start()
        started_at = time.monotonic_ns()
        return {}

    def stop(message: WorkerMessage) -> dict[str, Any]:
        request: StopRecording = parse(message)
        begin, end = request.begin, request.end
        if request.host != socket.gethostname():  # whose clock says nothing about this one's
            begin, end = started_at, time.monotonic_ns()
        # Reading a trace takes seconds, in which other messages have to be read.
        threading.Thread(target=reduce, args=(begin, end), name="rollmill-recording", daemon=True).start()
        return request._asdict()

    def reduce(begin: int, end: int) -> None:
        send(control, WindowRecorded(recorder.stop(begin, end).to_json()))

    control.answer(StartRecording.__name__, start)
    control.answer(StopRecording.__name__, stop)
