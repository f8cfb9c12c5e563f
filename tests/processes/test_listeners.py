"""The doors of a run: the broker's, the supervisor's, and that of the lines of Ray's workers."""

import contextlib
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from worker_jobs import job, obeys

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.errors import ConnectionLost
from rollmill.channels.transport import dialling, listener, refused_connections as refusals
from rollmill.channels.transport.dialling import Backoff, reach
from rollmill.channels.transport.handshake import NONCE_BYTES, converse, present
from rollmill.channels.transport.tcp_options import seconds_unacknowledged
from rollmill.processes import connection as connection_module, handshake as handshake_module
from rollmill.processes.cluster import output_forwarding as lines_module
from rollmill.processes.cluster.output_forwarding import OutputListener
from rollmill.processes.connection import Acceptor, WorkerConnection
from rollmill.processes.handshake import connect_as
from wordings import raises

TOKEN = b"token"


def broker_door():
    broker = LocalBroker()
    server = BrokerServer(broker, TOKEN.decode(), host="127.0.0.1")

    def enter():
        client = RemoteBroker(server.tcp_address, TOKEN.decode())
        assert client.lookup("x") is None
        return client

    def close():
        server.close()
        broker.close()

    return SimpleNamespace(address=server.tcp_address, enter=enter, close=close)


def supervisor_door():
    door = Acceptor(
        "tcp:127.0.0.1:0", TOKEN, lambda claim: WorkerConnection(print), lambda line: None, heartbeat_seconds=3.0
    )

    def enter():
        peer, settings = connect_as(door.address, TOKEN, job(obeys))
        assert settings == {"heartbeat_seconds": 3.0}
        return peer

    return SimpleNamespace(address=door.address, token=TOKEN, enter=enter, close=door.close)


def door_of_lines():
    outputs = OutputListener("127.0.0.1", lambda line: None)
    lines = []

    def enter():
        lines.append(outputs.expect(job(obeys)))
        peer, _ = connect_as(outputs.address, outputs.token, job(obeys), host="here", pid=7, node="")
        return peer

    def close():
        outputs.close()
        for line in lines:
            line.cut()
            assert line.ended.wait(5.0)

    return SimpleNamespace(address=outputs.address, token=outputs.token, enter=enter, close=close)


@pytest.fixture(params=[broker_door, supervisor_door, door_of_lines])
def door(request):
    door = request.param()
    yield door
    door.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollmill-listener"]


def knock(door):
    host, port = door.address.removeprefix("tcp:").split(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def enter(door):
    with contextlib.closing(door.enter()):
        pass


def test_strangers_who_are_slow_keep_nobody_out(door):
    """More than there is room for, each of whom has begun a handshake that it does not end."""
    with contextlib.ExitStack() as strangers:
        for _ in range(listener.MAX_HANDSHAKES + 16):
            strangers.enter_context(knock(door)).sendall(b"x")
        threads = threading.active_count()
        enter(door)
        assert threads < listener.MAX_HANDSHAKES // 2  # a stranger costs none


def test_the_limit_of_time_is_that_of_the_whole_handshake(door, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    with knock(door) as stranger, pytest.raises(OSError):
        for _ in range(60):  # seconds of a byte now and then
            stranger.sendall(b"x")
            time.sleep(0.1)
    monkeypatch.undo()
    enter(door)


def test_a_listener_goes_on_where_no_thread_can_be_started(door, monkeypatch):
    """The dialler has no answer yet, and tries again."""
    refused, start = [], threading.Thread.start

    def start_some(thread):
        if thread.name == "rollmill-connection" and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    enter(door)
    assert len(refused) == 3


@pytest.mark.parametrize("proof", [bytes(32), "ä".encode() * 16, b"\xff" * 32])
@pytest.mark.parametrize("claim", [b"", b"[" * 4000, b"\xff" * 100])
def test_what_makes_no_sense_is_refused_and_hurts_nobody(door, proof, claim):
    with knock(door) as stranger:
        stranger.sendall(bytes(NONCE_BYTES) + proof + len(claim).to_bytes(2, "little") + claim)
        said = b""
        while more := stranger.recv(1024):
            said += more
    assert said.endswith(b"-" + bytes(32))
    enter(door)


@pytest.mark.parametrize("claim", [b"", b"[" * 4000, b"{}", b'{"name": 3, "attempt": 0}', b'"\xff"'])
@pytest.mark.parametrize("make", [supervisor_door, door_of_lines])
def test_a_claim_that_makes_no_sense_ends_its_connection(make, claim):
    door = make()
    with knock(door) as stranger, raises("other-end-closed-connection"):
        converse(stranger, present(door.token, claim), timeout=30.0)
    enter(door)
    door.close()


def test_a_wait_that_overran_the_limit_of_time_hides_no_error(monkeypatch):
    attempts = []

    def lose_connection():
        attempts.append(time.monotonic())
        raise ConnectionLost("the first error.")

    monkeypatch.setattr(dialling.time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds + 0.2))
    with pytest.raises(ConnectionLost, match="the first error"):
        reach(lose_connection, TOKEN, timeout=0.2)
    assert len(attempts) == 1


def test_waits_grow_and_are_spread_by_chance():
    backoff = Backoff(0.1, 0.5)
    waits = [backoff.seconds() for _ in range(6)]
    for wait, limit in zip(waits, [0.1, 0.2, 0.4, 0.5, 0.5, 0.5], strict=True):
        assert limit / 2 <= wait <= limit
    assert len(set(waits)) == 6
    backoff.reset()
    assert backoff.seconds() <= 0.1


# --- refused connections ---------------------------------------------------------------------------------


def test_a_hundred_idle_strangers_are_one_line_with_their_address(monkeypatch):
    """64 of them end by the time limit, 36 make room for others: 100 in all."""
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(refusals, "IDLE_GATHER_SECONDS", 0.8)
    lines = []
    door = Acceptor("tcp:127.0.0.1:0", TOKEN, lambda claim: "nobody", lines.append)
    with contextlib.ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(knock(door))
        deadline = time.monotonic() + 10.0
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)
    door.close()
    (line,) = lines
    assert f"{door.address}: 100 connections from 127.0.0.1 were rejected: " in line
    assert "it did not authenticate within 0.3 s. (64)" in line
    assert "64 other connections are waiting to authenticate (36)" in line


def test_a_refusal_that_repeats_waits_for_its_minute(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(refusals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = refusals.RefusalLog(lines.append)
    for moment in (0.0, 0.5, 10.0, 20.0, 30.0):
        now[0] = moment
        log.add(refusals.RefusedConnection("10.0.0.7", "it does not know the token"))
        now[0] = moment + 0.5
        log.show_due()
    assert lines == ["2 connections from 10.0.0.7 were rejected: it does not know the token"]
    log.add(refusals.RefusedConnection("10.0.0.8", "it closed"))  # it is news, and takes the rest with it
    now[0] += 1.0
    log.show_due()
    assert lines[1:] == [
        (
            "4 connections from 10.0.0.7 (3), 10.0.0.8 (1) were rejected: it does not know the token "
            "(3); it closed (1)"
        )
    ]
    log.add(refusals.RefusedConnection("10.0.0.7", "it does not know the token"))
    assert log.due == 31.5 + 60.0  # a minute after the last line about it


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
@pytest.mark.parametrize("make", [supervisor_door, door_of_lines])
def test_both_ends_of_a_line_notice_a_lost_link_after_twenty_seconds(make):
    accepted = []

    def welcome(peer, *rest, **settings):
        accepted.append(peer)
        handshake_module.welcome(peer, *rest, **settings)

    door = make()
    with pytest.MonkeyPatch.context() as patch:
        for module in (connection_module, lines_module):
            patch.setattr(module, "welcome", welcome)
        peer = door.enter()
    with contextlib.closing(peer):
        for end in (peer, *accepted):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
            assert seconds_unacknowledged(end) < 10.0
    assert len(accepted) == 1
    door.close()
