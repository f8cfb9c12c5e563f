"""Clients without the token, or that take no answers, keep nobody else out."""

import contextlib
import json
import time

import pytest

from .conftest import serving

TOKEN = "s" * 40
OBSERVATION = {"observation": [0.1, 0.2, 0.3, 0.4]}
OWN = {"Authorization": f"Bearer {TOKEN}"}


def read_all(connection):
    received = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            received += part
    return received


def exchange(server, data):
    """Everything that a server answers to these bytes, until it closes the connection."""
    with server.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return read_all(connection)


def test_bodies_of_refused_requests_are_not_held(cartpole):
    with serving(cartpole, token=TOKEN.encode(), held_bytes=4096) as server, contextlib.ExitStack() as stack:
        size = server.server._limits.body_bytes - 1
        for _ in range(8):  # each alone would take all that may be held
            stranger = stack.enter_context(server.connect())
            stranger.sendall(b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
            stranger.sendall(b"x" * (size - 1))
        time.sleep(0.3)
        assert server.ask("/act", OBSERVATION, headers=OWN)[0] == 200
        assert server.server._context.held_bytes == 0
        stranger.sendall(b"x")
        assert stranger.recv(4096).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(("token", "status"), [(None, 400), (TOKEN.encode(), 401)])
def test_a_length_of_thousands_of_digits_is_answered(cartpole, token, status, capfd):
    with serving(cartpole, token=token) as server:
        answer = exchange(
            server, b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"0" * 5000 + b"4\r\n\r\n{}  "
        )
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_that_is_too_long_is_refused_after_the_token(cartpole):
    head = b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n"
    with serving(cartpole, token=TOKEN.encode()) as server:
        assert exchange(server, head + b"\r\n").startswith(b"HTTP/1.1 401 ")
        assert exchange(server, head + b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n").startswith(
            b"HTTP/1.1 413 "
        )


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET /"], ids=["a header's name", "a path"])
def test_a_head_without_an_end_is_refused_at_its_limit(cartpole, start):
    with serving(cartpole) as server:
        began = time.monotonic()
        assert exchange(server, start + b"x" * 100_000).startswith(b"HTTP/1.1 431 ")
        assert time.monotonic() - began < 5  # not after the 10 s that a request may take


def test_clients_that_take_no_answers_are_read_no_further(cartpole):
    requests = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000
    with serving(cartpole, send_seconds=60.0) as server, contextlib.ExitStack() as stack:
        for _ in range(60):
            deaf = stack.enter_context(server.connect())
            deaf.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                deaf.send(requests)
        began = time.monotonic()
        assert server.ask("/health")[0] == 200
        assert time.monotonic() - began < 1.0
        waiting = [len(each._data) for each in server.server._context.connections]
        assert max(waiting) <= 2**18 + 2**14  # one read beyond what may wait


def test_pipelined_requests_are_all_answered_in_order_up_to_the_end_of_input(cartpole):
    paths = [b"/health", b"/nothing"] * 200
    with serving(cartpole) as server, server.connect() as connection:
        connection.sendall(b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths))
        connection.shutdown(1)
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"404"] * 200
    assert json.loads(answers[0].partition(b"\r\n\r\n")[2]) == {"status": "ready"}
