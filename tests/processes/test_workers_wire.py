"""Input from sockets and pipes is checked: frames, the handshake, and lines."""

import json
import socket
import struct
import threading
import time

import numpy as np
import pytest
from worker_jobs import job, obeys

from rollmill.channels.errors import Abandoned, Damaged
from rollmill.channels.transport.addresses import listen
from rollmill.channels.transport.handshake import GREETING
from rollmill.core.errors import UsageError
from rollmill.processes.framing import MAGIC, PREFIX, Limits, encode, receive_frame
from rollmill.processes.handshake import connect_as
from rollmill.processes.heartbeat import Progress
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import status_text
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.logs import WorkerLog, last_line
from rollmill.processes.mailbox import MAX_UNTAKEN, Mailbox
from rollmill.processes.messages import WorkerMessage
from rollmill.processes.supervisor import Supervisor
from wordings import raises


def received(data):
    """The message that a peer reads from these bytes, after which the connection ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (ours.sendall(data), ours.shutdown(socket.SHUT_WR)))
        writer.start()
        try:
            return receive_frame(theirs)
        finally:
            writer.join()


def frame(header, arrays=b"", *, announced=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), len(arrays) if announced is None else announced) + text + arrays


def header(*arrays, kind="numbers"):
    return {"kind": kind, "fields": {}, "arrays": list(arrays)}


def test_a_frame_is_what_its_description_says():
    data = frame(header(["x", "int16", [2]]), b"\x01\x00\x02\x00")
    assert data[:16] == struct.pack("<4sIQ", b"RMW1", len(data) - 20, 4)
    message = received(data)
    assert message.kind == "numbers"
    np.testing.assert_array_equal(message.arrays["x"], np.array([1, 2], np.int16))
    assert received(b"") is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "starts with b'GET '"),
        (frame(header())[:-3], "ended 3 bytes before"),
        (frame(b"{not json"), "is not valid JSON"),
        (frame(b"[" * 100_000), "is not valid JSON"),
        (frame({"kind": 3, "fields": {}, "arrays": []}), "must contain kind, fields and arrays"),
        (frame(header(["x", "int16", [2]]), b"12"), "which does not match their shapes"),
        (frame(header(["x", "int16", [-1]])), "by its name, dtype and shape"),
        (frame(header(["x", "int16", [True]]), b"12"), "by its name, dtype and shape"),
        (frame(header(["x", "object", [1]]), b"12345678"), "which is not numeric"),
        (frame(header(["x", "V8", [1]]), b"12345678"), "which is not numeric"),
        (frame(header(["x", "i4,i4", [1]]), b"12345678"), "which is not numeric"),
        (frame(header(["x", "(2", [1]]), b"12345678"), "unknown dtype"),
        (PREFIX.pack(MAGIC, 2**31, 0), "announces 2,147,483,648 bytes of JSON"),
        (PREFIX.pack(MAGIC, 2, 2**62), "more than the limits"),
    ],
)
def test_a_frame_that_makes_no_sense_is_damaged(data, why):
    with pytest.raises(Damaged, match=why.replace("(", r"\(")):
        received(data)


def test_what_is_too_large_to_be_taken_is_not_sent():
    message = WorkerMessage("numbers", {}, {"x": np.zeros(100)})
    with raises("message-has-bytes-and-may", "800", "arrays", "799"):
        encode(message, Limits(array_bytes=799))
    with raises("message-has-bytes-and-may", "JSON"):
        encode(message, Limits(json_bytes=10))


@pytest.fixture
def refused():
    """A supervisor on TCP that expects a worker which never starts, and what it says about whom it refuses."""
    lines = []
    with (
        LocalLauncher() as launcher,
        Supervisor([job(obeys)], launcher=launcher, address="tcp:127.0.0.1:0", display=lines.append) as supervisor,
    ):
        yield supervisor, lines


def wait_for(lines, text):
    deadline = time.monotonic() + 5.0
    while not any(text in line for line in lines):
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_strangers_are_refused(refused):
    supervisor, lines = refused
    host, port = supervisor.address.removeprefix("tcp:").split(":")
    with (
        socket.create_connection((host, int(port))) as silent,
        socket.create_connection((host, int(port))) as loud,
    ):
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(66))
        wait_for(lines, "the claim of the connecting process has 8,224 bytes")
        with raises("connection-was-refused-token-is"):
            connect_as(supervisor.address, b"guess", job(obeys))
        wait_for(lines, "does not have the run's token")
        with raises("coordinator-refused-this-worker", "no worker with this name and attempt"):
            connect_as(supervisor.address, supervisor._token, job(obeys, 7))
        silent.close()
        wait_for(lines, "reset by peer")  # it left the greeting unread


def test_a_worker_refuses_a_coordinator_without_the_token():
    listener, address = listen("tcp:127.0.0.1:0")

    def pretend():
        peer, _ = listener.accept()
        with peer:
            peer.sendall(GREETING + bytes(32))
            peer.recv(4096)
            peer.sendall(b"+" + b"trust me".ljust(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with listener, raises("listener-there-does-not-know"):
        connect_as(address, b"token", job(obeys))
    thread.join()


@pytest.mark.parametrize(
    "address", ["tcp:localhost", "tcp:nowhere.invalid:0", "udp:localhost:1", "unix:/no/such/x"]
)
def test_addresses_that_cannot_be_listened_on(address):
    with pytest.raises(UsageError, match=address):
        listen(address)


def test_a_unix_address_with_a_path(tmp_path):
    listener, address = listen(f"unix:{tmp_path}/s")
    with listener:
        assert address == f"unix:{tmp_path}/s"
        assert (tmp_path / "s").is_socket()


def test_a_mailbox_keeps_messages_until_they_are_taken():
    mailbox = Mailbox()
    for number in range(3):
        mailbox.put(WorkerMessage("a", {"number": number}, {}))
    mailbox.put(WorkerMessage("b", {}, {}))
    assert mailbox.wait("a", 0.0).fields == {"number": 0}
    assert mailbox.latest("a").fields == {"number": 2}
    assert mailbox.latest("a") is None
    with raises("no-message-kind-came-within", "'a'"):
        mailbox.wait("a", 0.01)
    mailbox.stop()
    with pytest.raises(Abandoned):
        mailbox.wait("b", 0.0)
    with pytest.raises(Abandoned):
        mailbox.check()


def test_a_worker_that_does_not_read_is_told():
    mailbox = Mailbox()
    for _ in range(MAX_UNTAKEN + 1):
        mailbox.put(WorkerMessage("a", {}, {}))
    with raises("messages-kind-lie-untaken-more", "'a'", "10,000"):
        mailbox.check()


def test_a_pulse_measures_idleness():
    pulse = Progress(threading.get_ident())
    pulse.note("thinking", 0.05)
    pulse.look()
    time.sleep(0.1)
    assert pulse.look().hung_seconds(0.01) >= 0.1
    assert pulse.look().hung_seconds(10.0) is None
    with pulse.idle("waiting"):
        assert pulse.look().hung_seconds(0.0) is None
    assert (pulse.look().note, pulse.look().expect) == ("thinking", 0.05)


def test_a_log_line_that_never_ends_takes_no_memory():
    lines = []
    log = WorkerLog(job(obeys), lines.append, None)
    for percent in range(100_000):
        log.feed(f"\r{percent}%".encode())
    assert len(log._rest) < 5000
    log.end()
    assert lines[-1] == "[actor/0] 99999%"


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "exit code 3"), (-15, "killed by SIGTERM"), (-9, "killed by SIGKILL (the kernel"), (-99, "signal 99")],
)
def test_exit_statuses_in_words(status, text):
    assert text in status_text(status)


def test_a_job_survives_json():
    todo = Job("a/1", "a", 1, "m:f", {"rates": [1, 2.5], "name": None}, {"X": "1"}, attempt=3)
    assert Job.from_json(todo.to_json()) == todo


JAX_NOTICE = "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback of ..."


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        ("one\ntwo\n", "two"),
        ("", "it printed nothing"),
        (f"{5000 * 'x'}\nValueError: no\n{JAX_NOTICE}\n", "ValueError: no"),
    ],
)
def test_the_last_line_of_an_error_is_the_error_itself(tmp_path, printed, last):
    (tmp_path / "log").write_text(printed)
    assert last_line(tmp_path / "log") == last
