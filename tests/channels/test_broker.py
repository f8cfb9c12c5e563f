"""The broker: the same memory for the same name, nothing for who does not know the token."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import GREETING, admit, converse, new_token, present
from rollmill.core.errors import RollmillError, UsageError
from wordings import raises


@pytest.fixture
def remote(coordinator):
    brokers = []

    def connect(*, over_tcp=False, token=None):
        server = coordinator.server
        address = server.tcp_address if over_tcp else server.address
        brokers.append(RemoteBroker(address, token or coordinator.token))
        return brokers[-1]

    yield connect
    for broker in brokers:
        broker.close()


def test_who_asks_for_a_name_again_gets_the_same_memory(coordinator, remote):
    first = remote().segment("ring", nbytes=4096, digest="d")
    assert bytes(first[:8]) == bytes(8)
    first[:4] = b"data"
    assert bytes(remote().segment("ring", nbytes=4096, digest="d")[:4]) == b"data"
    assert bytes(coordinator.broker.segment("ring", nbytes=4096, digest="d")[:4]) == b"data"
    assert bytes(remote().segment("other", nbytes=4096, digest="d")[:4]) == bytes(4)


def test_another_digest_or_size_is_refused(remote):
    remote().segment("ring", nbytes=4096, digest="d")
    with raises("was-opened-as-and-now", "ring", "d", "e"):
        remote().segment("ring", nbytes=4096, digest="e")
    with raises("has-bytes-were-asked-for", "ring", "4096", "8192"):
        remote().segment("ring", nbytes=8192, digest="d")
    remote().agree("end", digest="d")
    with raises("was-opened-as-and-now"):
        remote().agree("end", digest="e")


def test_a_doorbell_rings_in_another_process_once_for_many_rings(coordinator, remote):
    rings, hears = remote().doorbell("bell"), coordinator.broker.doorbell("bell")
    for _ in range(3):
        rings.ring()
    assert is_readable(hears.fileno())
    hears.silence()
    assert not is_readable(hears.fileno())


def is_readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_addresses_are_announced_and_looked_up(remote):
    assert remote().lookup("end") is None and remote().holder("end") == 0
    first = remote().claim("end")
    remote().announce("end", ("10.0.0.1", 4000), first)
    assert remote().lookup("end") == ("10.0.0.1", 4000)
    second = remote(over_tcp=True).claim("end")
    assert (first, second, remote().holder("end")) == (1, 2, 2)
    assert remote().lookup("end") is None
    remote(over_tcp=True).announce("end", ("10.0.0.2", 4001), second)
    remote().announce("end", ("10.0.0.1", 4000), first)  # it was replaced
    assert remote().lookup("end") == ("10.0.0.2", 4001)


def test_memory_is_not_handed_out_over_tcp(remote):
    with raises("memory-is-shared-within-one", kind=UsageError):
        remote(over_tcp=True).segment("ring", nbytes=64, digest="d")


@pytest.mark.parametrize("over_tcp", [False, True])
def test_another_token_is_refused(coordinator, remote, over_tcp):
    with raises("connection-was-refused-token-is"):
        remote(over_tcp=over_tcp, token=new_token())
    assert remote(over_tcp=over_tcp).lookup("x") is None  # and the broker still works


def test_the_token_does_not_travel(run_together):
    token, said = new_token(), {"admits": b"", "presents": b""}
    ends = dict(zip(said, socket.socketpair(), strict=True))

    def overheard(side, dialogue):
        step = next(dialogue)
        while True:
            said[side] += step[0]
            try:
                step = dialogue.send((yield step))
            except StopIteration as end:
                said[side] += getattr(end.value, "answer", b"")
                return end.value

    def admits():
        admission = converse(ends["admits"], overheard("admits", admit(token.encode())), timeout=5.0)
        ends["admits"].sendall(admission.answer)
        assert admission.claim == b"who I am"

    def presents():
        converse(ends["presents"], overheard("presents", present(token.encode(), b"who I am")), timeout=5.0)

    run_together(admits, presents)
    assert len(said["admits"]) == len(GREETING) + 32 + 33 and len(said["presents"]) == 66 + len(b"who I am")
    for words in said.values():
        assert token.encode() not in words and bytes.fromhex(token) not in words
    for sock in ends.values():
        sock.close()


def test_a_proof_that_was_overheard_opens_nothing(coordinator):
    """Nonces are fresh, so neither an old proof nor the broker's own words are one."""
    host, port = coordinator.server.tcp_address.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        words = sock.recv(1024)
        sock.sendall((words[len(GREETING) :] + bytes(32))[:64] + bytes(2))
        assert sock.recv(1024) == b"-" + bytes(32)
        assert sock.recv(1024) == b""


@pytest.mark.parametrize("request_", [{"ask": "eval", "name": "x"}, {"ask": "segment", "name": "x"}, {"x": 1}])
def test_what_is_no_request_gets_an_error_and_hurts_nobody(coordinator, request_):
    connection = connected(coordinator)
    connection.send_json(request_, timeout=5.0)
    assert "error" in connection.receive_json(timeout=5.0)[0]
    connection.send_json({"ask": "lookup", "name": "x"}, timeout=5.0)
    assert connection.receive_json(timeout=5.0)[0] == {"address": None}
    connection.close()


DEEP = (60_000).to_bytes(4, "little") + b'{"a":' * 12_000
"""An object that Python's own parser follows until its stack ends."""


@pytest.mark.parametrize("words", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00nope", b"\x02\x00\x00\x00[]", DEEP])
def test_words_that_are_no_json_object_end_the_connection(coordinator, words):
    connection = connected(coordinator)
    connection.send(words, timeout=5.0)
    with pytest.raises(RollmillError):
        connection.receive(1, timeout=5.0)
    connection.close()


def connected(coordinator):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(coordinator.server.address.removeprefix("unix:").replace("@", "\0"))
    converse(sock, present(coordinator.token.encode()), timeout=5.0)
    return Connection(sock)


@pytest.mark.parametrize("address", ["unix:@rollmill-nobody", "unix:/nowhere/broker", "tcp:127.0.0.1:1"])
def test_nobody_at_the_address_is_told(address):
    with raises("no-broker-answers-at"):
        RemoteBroker(address, "token")


@pytest.mark.parametrize("address", ["", "unix:", "tcp:host", "http://x:1"])
def test_what_is_no_address_is_told(address):
    with raises("address-is-none-write-tcp"):
        RemoteBroker(address, "token")


def test_closing_the_server_ends_its_threads_and_the_clients_questions(coordinator, remote):
    client = remote()
    coordinator.server.close()
    with raises("coordinators-broker-is-gone"):
        client.lookup("x")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollmill-")]


def test_the_ways_of_other_systems_work_as_well(monkeypatch, tmp_path):
    """Files without a name, pipes, and a socket in a short directory."""
    monkeypatch.setattr("rollmill.channels.shm.memory.ON_LINUX", False)
    monkeypatch.setattr("rollmill.channels.shm.doorbell.HAS_EVENTFD", False)
    monkeypatch.setattr("rollmill.channels.transport.addresses.HAS_ABSTRACT_PATHS", False)
    broker = LocalBroker()
    server = BrokerServer(broker, "token")
    socket_path = Path(server.address.removeprefix("unix:"))
    assert socket_path.is_socket()
    remote = RemoteBroker(server.address, "token")
    layout = Layout.of(np.zeros(1000))
    sender = MemoryWire(remote).sender("edge", source=0, targets=[0], layout=layout)
    receiver = MemoryWire(broker).receiver("edge", sources=[0], target=0, layout=layout)
    for number in range(5):
        sender.send(np.full(1000, float(number)), timeout=5.0)
        with receiver.receive(timeout=5.0) as message:
            assert (message.tree == number).all()
    for end in (remote, server, broker):
        end.close()
    assert not socket_path.parent.exists()


def test_ends_may_be_closed_after_their_broker():
    broker = LocalBroker()
    layout = Layout.of(np.zeros(10))
    sender = MemoryWire(broker).sender("edge", source=0, targets=[0], layout=layout)
    receiver = MemoryWire(broker).receiver("edge", sources=[0], target=0, layout=layout)
    sender.send(np.arange(10.0))
    broker.close()
    with receiver.receive() as message:
        assert message.tree.tolist() == list(range(10))
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive()
    receiver.close()


COORDINATOR = """
import sys, time
from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
import numpy as np
broker = LocalBroker()
server = BrokerServer(broker, "token")
layout = Layout.of(np.zeros(100_000))
sender = MemoryWire(broker).sender("edge", source=0, targets=[0], layout=layout)
sender.send(np.ones(100_000))
print(server.address, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the socket's path is a file")
def test_nothing_is_left_when_everybody_is_killed(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", COORDINATOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = process.stdout.readline().strip().removeprefix("unix:")
        assert address in unix_sockets()
        client = RemoteBroker(f"unix:{address}", "token")
        process.send_signal(signal.SIGKILL)
        process.wait()
    client.close()
    assert address not in unix_sockets()
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in Path("/dev/shm").iterdir() if "rollmill" in path.name]


def unix_sockets():
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
