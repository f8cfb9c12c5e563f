"""Faults that only connections have: they get lost, bring too much, bring nonsense."""

import itertools
import threading
import time

import numpy as np
import pytest

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.errors import ConnectionLost, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.tcp.queue import MESSAGE, WORD
from rollmill.channels.tcp.receiving import Stream
from rollmill.channels.tcp.wire import TcpWire
from rollmill.channels.transport.connection import Connection
from wordings import raises

LAYOUT = Layout.of({"values": np.zeros((300,), np.int64)})


def package(number):
    return {"values": np.full((300,), number, np.int64)}


@pytest.fixture
def open_tcp_wire(coordinator):
    opened = []

    def open_wire():
        broker = RemoteBroker(coordinator.server.tcp_address, coordinator.token)
        wire = TcpWire(broker, coordinator.token)
        opened.extend([wire, broker])
        return wire

    yield open_wire
    for end in opened:
        end.close()


@pytest.mark.parametrize("where", ["sender", "receiver"])
def test_nothing_is_lost_or_doubled_when_connections_break_and_both_ends_live(
    open_tcp_wire, run_together, monkeypatch, where
):
    """At the receiver the message is lost that had been sent whole, and the sender has its credit."""
    broken, count = break_connections(monkeypatch, where), 200
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=4, checksum=True)
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=4)

    def sending():
        for number in range(count):
            sender.send(package(number), iteration=number, timeout=20.0)

    def receiving():
        for number in range(count):
            with receiver.receive(timeout=20.0) as message:
                assert (message.header.sequence, message.header.iteration) == (number, number)
                assert (message.tree["values"] == number).all()

    run_together(sending, receiving)
    with pytest.raises(TimedOut):
        receiver.receive(timeout=0.0)
    assert len(broken) > 5


def break_connections(monkeypatch, where):
    """Each 17th message ends the connection: after a half of it was sent, or when it was not read yet."""
    broken, calls = [], itertools.count(1)
    cls, name = (Connection, "send") if where == "sender" else (Stream, "header")
    original = getattr(cls, name)

    def breaking(self, *parts):
        if next(calls) % 17 == 0 and (where == "receiver" or len(parts) == 2):
            broken.append(self)
            if where == "sender":
                original(self, parts[0], parts[1][:1000])
            raise ConnectionLost("broken by the test")
        return original(self, *parts)

    monkeypatch.setattr(cls, name, lambda self, *parts, **options: breaking(self, *parts))
    return broken


def test_what_was_not_sent_yet_goes_to_the_receivers_replacement(open_tcp_wire):
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    first = open_tcp_wire()
    receiver = first.receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    for number in range(2):
        sender.send(package(number), timeout=10.0)
    held = receiver.receive(timeout=10.0)
    assert held.header.sequence == 0
    until = time.monotonic() + 10
    while receiver.statistics()[0].depth == 0 and time.monotonic() < until:
        time.sleep(0.005)
    first.close()  # as if its process died: with one message held, and one not taken
    second = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    for number in range(2, 6):
        sender.send(package(number), timeout=10.0)
        with second.receive(timeout=10.0) as message:
            assert message.header.sequence == number
            assert (message.tree["values"] == number).all()


def test_packages_larger_than_what_a_socket_holds(open_tcp_wire):
    layout = Layout.of(np.zeros((9, 100_001), np.float32))
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=layout, capacity=1, checksum=True)
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=layout, capacity=1)
    for number in range(3):
        sent = np.random.default_rng(number).random((9, 100_001), np.float32)
        sender.send(sent, timeout=10.0)
        with receiver.receive(timeout=10.0) as message:
            np.testing.assert_array_equal(message.tree, sent)


def test_what_is_no_message_ends_its_connection_and_hurts_nobody(open_tcp_wire):
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT)
    stranger = open_tcp_wire()
    hello = {"sender": 1, "sequence": 0}
    connection, answer = stranger._hub.dial("edge/0 to 0/receiver", source=0, **hello)
    assert answer["arrived"] == 0
    connection.send(WORD.pack(MESSAGE) + b"\xff" * 48, timeout=5.0)
    with raises("other-end-closed-connection"):
        connection.receive(1, timeout=5.0)
    connection.close()
    assert stranger._hub.dial("edge/0 to 0/receiver", source=7, **hello) is None  # no such source
    assert stranger._hub.dial("edge/0 to 1/receiver", source=0, **hello) is None  # no such end
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT)
    sender.send(package(3), timeout=5.0)
    assert (receiver.receive(timeout=5.0).tree["values"] == 3).all()


def test_closing_a_wire_sends_first_what_its_closed_senders_have_left(open_tcp_wire):
    wire = open_tcp_wire()
    sender = wire.sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=8)
    for number in range(8):
        sender.send(package(number), timeout=5.0)
    sender.close()
    closing = threading.Thread(target=wire.close)
    closing.start()
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=8)
    assert receiver.gather(count=8, timeout=5.0).tree["values"][::300].tolist() == list(range(8))
    closing.join()


def test_a_senders_replacement_is_told_how_many_messages_arrived(open_tcp_wire):
    first = open_tcp_wire()
    sender = first.sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    assert sender.statistics()[0].messages == 0  # nobody was before it: it need not ask
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    for number in range(3):
        sender.send(package(number), timeout=10.0)
        receiver.receive(timeout=10.0).release()
    assert sender.statistics()[0].messages == 3
    first.close()
    second = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    assert second.statistics()[0].messages == 3
    second.send(package(3), timeout=10.0)
    assert second.statistics()[0].messages == 4
    assert receiver.receive(timeout=10.0).header.sequence == 3


def test_a_senders_replacement_waits_for_room_like_its_predecessor(open_tcp_wire):
    first = open_tcp_wire()
    sender = first.sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=1)
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=1)
    sender.send(package(0), timeout=10.0)
    held = receiver.receive(timeout=10.0)
    first.close()
    second = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=1)
    assert second.statistics()[0].messages == 1
    with pytest.raises(TimedOut):
        second.reserve(timeout=0.3)
    held.release()
    second.send(package(1), timeout=10.0)
    assert receiver.receive(timeout=10.0).header.sequence == 1


def test_a_receivers_replacement_is_told_how_many_messages_were_sent(open_tcp_wire):
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    first = open_tcp_wire()
    receiver = first.receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    assert receiver.statistics()[0].messages == 0
    for number in range(2):
        sender.send(package(number), timeout=10.0)
    receiver.receive(timeout=10.0).release()
    until = time.monotonic() + 10
    while receiver.statistics()[0].depth == 0 and time.monotonic() < until:
        time.sleep(0.005)
    first.close()  # with a message that arrived and was not taken
    second = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    assert second.statistics()[0].messages == 2
    sender.send(package(2), timeout=10.0)
    second.receive(timeout=10.0).release()
    assert second.statistics()[0].messages == 3


def test_a_replacement_that_never_meets_the_other_end_can_be_stopped(coordinator):
    broker = RemoteBroker(coordinator.server.tcp_address, coordinator.token)
    wires = [TcpWire(broker, coordinator.token, abandon=stopped) for stopped in (lambda: False, lambda: True)]
    senders = [wire.sender("edge", source=0, targets=[0], layout=LAYOUT) for wire in wires]
    assert senders[0].statistics()[0].messages == 0
    with raises("was-given-up-because-run", "sending edge from 0"):
        senders[1].statistics()
    for end in (*wires, broker):
        end.close()


def test_receivers_of_one_rank_may_share_its_sources_out(open_tcp_wire):
    wire = open_tcp_wire()
    receivers = [wire.receiver("edge", sources=[source], target=0, layout=LAYOUT) for source in range(2)]
    for source in (1, 0):
        sender = open_tcp_wire().sender("edge", source=source, targets=[0], layout=LAYOUT)
        sender.send(package(source), timeout=5.0)
        with receivers[source].receive(timeout=10.0) as message:
            assert (message.tree["values"] == source).all()


def test_finishing_a_wire_sends_first_what_its_senders_have_left(open_tcp_wire):
    wire = open_tcp_wire()
    sender = wire.sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=8)
    for number in range(8):
        sender.send(package(number), timeout=5.0)
    finishing = threading.Thread(target=wire.finish)
    finishing.start()
    finishing.join(0.2)
    assert finishing.is_alive()
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=8)
    assert receiver.gather(count=8, timeout=5.0).tree["values"][::300].tolist() == list(range(8))
    finishing.join(10.0)
    assert not finishing.is_alive()


def test_sequences_never_begin_anew_where_both_ends_are_replaced(open_tcp_wire):
    sequences = []
    for _ in range(3):
        wires = [open_tcp_wire(), open_tcp_wire()]
        sender = wires[0].sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
        receiver = wires[1].receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
        for number in range(3):
            sender.send(package(number), timeout=10.0)
            with receiver.receive(timeout=10.0) as message:
                sequences.append(message.header.sequence)
        assert sender.statistics()[0].messages == 3  # nobody remembers those before
        for wire in wires:
            wire.close()
    assert sequences[:3] == [0, 1, 2]
    assert sequences == sorted(set(sequences))


def test_a_sender_that_was_replaced_is_turned_away(open_tcp_wire):
    """It was believed dead; its connection must not take that of its successor's place."""
    receiver = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    old = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    old.send(package(0), timeout=10.0)
    receiver.receive(timeout=10.0).release()
    new = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    for number in range(1, 4):
        new.send(package(number), timeout=10.0)
        with receiver.receive(timeout=10.0) as message:
            assert (message.header.sequence, message.tree["values"][0]) == (number, number)
    with raises("another-producer-took-this-ones"):
        for _ in range(4):
            old.send(package(-1), timeout=10.0)
    with pytest.raises(TimedOut):
        receiver.receive(timeout=0.0)


def test_a_receiver_that_was_replaced_is_left_by_its_senders(open_tcp_wire):
    """It was believed dead, and its connection is as good as ever."""
    sender = open_tcp_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    old = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    sender.send(package(0), timeout=10.0)
    assert old.receive(timeout=10.0).header.sequence == 0  # held, and never released
    new = open_tcp_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    with raises("another-receiver-took-this-ones"):
        old.receive(timeout=10.0)
    assert new.statistics()[0].messages == 1
    sender.send(package(1), timeout=10.0)
    assert new.receive(timeout=10.0).header.sequence == 1
