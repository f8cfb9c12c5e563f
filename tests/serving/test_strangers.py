"""Clients without the token, or that take no answers, keep nobody else out."""

import contextlib
import errno
import json
import resource
import socket
import time

import pytest

from rollmill.serving import raise_descriptor_limit
from rollmill.serving.unadmitted import Strangers, host_of

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
        assert time.monotonic() - began < 30.0  # not after the minute that they may take
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


def is_open(connection):
    """True if nothing has come from a server, and the connection has not ended."""
    connection.settimeout(0.05)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_strangers_who_take_all_connections_keep_nobody_out(cartpole):
    known = b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
    with serving(cartpole, token=TOKEN.encode(), connections=8) as server, contextlib.ExitStack() as stack:
        own = stack.enter_context(server.connect())
        own.sendall(known)
        assert own.recv(4096).startswith(b"HTTP/1.1 200 ")
        for content in (b"", b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") * 10:
            stranger = stack.enter_context(server.connect())
            stranger.sendall(content)
        time.sleep(0.2)
        began = time.monotonic()
        assert server.ask("/act", OBSERVATION, headers=OWN)[0] == 200
        assert time.monotonic() - began < 9.0  # not after the 10 s that a request may take
        assert len(server.server._context.connections) <= 8 + 1
        own.sendall(known)
        assert own.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_host_with_many_connections_loses_its_own(cartpole):
    with serving(cartpole, token=TOKEN.encode(), connections=8) as server, contextlib.ExitStack() as stack:
        place = ("127.0.0.1", server.port)
        other = stack.enter_context(socket.create_connection(place, timeout=20, source_address=("127.0.0.2", 0)))
        many = [stack.enter_context(server.connect()) for _ in range(30)]
        for each in many[:23]:
            each.settimeout(20.0)
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
        assert is_open(other) and all(map(is_open, many[23:]))


def test_known_connections_are_never_closed_for_new_ones(cartpole):
    with serving(cartpole, connections=3) as server, contextlib.ExitStack() as stack:
        known = [stack.enter_context(server.connect()) for _ in range(3)]
        for each in known:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
        for _ in range(5):
            with server.connect() as refused:
                assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert all(map(is_open, known))


def test_strangers_are_closed_when_there_are_no_more_descriptors(cartpole):
    with serving(cartpole, token=TOKEN.encode()) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(3)]
        time.sleep(0.2)

        class NoDescriptors:
            def accept(self):
                raise OSError(errno.EMFILE, "too many open files")

            def fileno(self):
                return -1

        loop = server.server._application._clock.__self__
        server.server._pause = lambda listener: None
        loop.call_soon_threadsafe(server.server._accept, NoDescriptors())
        time.sleep(0.2)
        assert [is_open(each) for each in idle] == [False] * 3


class Fake:
    def __init__(self):
        self.closed = False

    def give_up(self):
        self.closed = True


def test_the_oldest_of_the_host_with_the_most_is_closed_first():
    strangers, made = Strangers(), {}
    for name in ("a1", "b1", "b2", "a2", "b3"):
        made[name] = Fake()
        strangers.add(made[name], (f"10.0.0.{'ab'.index(name[0])}", 1))
    order = []
    while strangers.close_one():
        (closed,) = [name for name, fake in made.items() if fake.closed and name not in order]
        order.append(closed)
    # Three of b and two of a: b loses one, then the first of two equal hosts, and so on.
    assert order == ["b1", "a1", "b2", "a2", "b3"]
    assert len(strangers) == 0


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_host_of_ipv6_is_its_network(peer, host):
    assert host_of(peer) == host


def test_the_limit_of_descriptors_is_raised_to_what_connections_need():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        raise_descriptor_limit(1024)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2048, before[1])
        raise_descriptor_limit(4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2048, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
