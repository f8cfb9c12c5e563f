"""Senders and receivers over every wire: order, routes, back-pressure, batches, ways out of waiting."""

import threading
import time

import numpy as np
import pytest

from rollmill.channels.errors import Abandoned, ChannelClosed, TimedOut
from rollmill.channels.layout import Layout
from wordings import raises

LAYOUT = Layout.of({"values": np.zeros((2, 3), np.float32), "tag": np.zeros((1,), np.int32)})


def package(number):
    return {"values": np.full((2, 3), number, np.float32), "tag": np.full((1,), number, np.int32)}


def number_of(tree):
    assert (tree["values"] == float(tree["tag"][0])).all()
    return int(tree["tag"][0])


def eventually(holds, seconds=30.0):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def test_every_package_arrives_once_whole_and_in_order(open_wire, run_together):
    count, sources, targets = 60, range(3), range(2)

    def produce(source):
        sender = open_wire().sender("edge", source=source, targets=list(targets), layout=LAYOUT, checksum=True)
        for number in range(count):
            sender.send(package(100 * source + number), iteration=number, timeout=10.0)
        sender.close()

    def consume(target):
        receiver = open_wire().receiver("edge", sources=list(sources), target=target, layout=LAYOUT)
        taken = []
        while True:
            try:
                message = receiver.receive(timeout=10.0)
            except ChannelClosed:
                return taken
            with message:
                taken.append((message.header.source, message.header.sequence, number_of(message.tree)))

    ends = [lambda s=source: produce(s) for source in sources] + [
        lambda t=target: consume(t) for target in targets
    ]
    *_, first, second = run_together(*ends)
    for target, taken in enumerate((first, second)):
        for source in sources:
            of_source = [(sequence, number) for sender, sequence, number in taken if sender == source]
            assert of_source == [(i, 100 * source + 2 * i + target) for i in range(count // 2)]


def test_a_full_channel_holds_the_sender_until_a_slot_is_released(open_wire):
    sender = open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    receiver = open_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    for number in range(2):
        sender.send(package(number), timeout=0.0)
    with raises("nothing-happened-within-s", "sending edge"):
        sender.send(package(2), timeout=0.02)
    held = receiver.receive(timeout=5.0)
    with pytest.raises(TimedOut):  # taken, but its slot is still in use
        sender.send(package(2), timeout=0.0)
    timer = threading.Timer(0.05, held.release)
    timer.start()
    sender.send(package(2), timeout=5.0)
    timer.join()
    assert [number_of(receiver.receive(timeout=5.0).tree) for _ in range(2)] == [1, 2]


def test_receiving_from_nobody_times_out_and_says_what_was_awaited(open_wire):
    receiver = open_wire().receiver("edge", sources=[0, 1], target=3, layout=LAYOUT)
    with raises("nothing-happened-within-s", "receiving edge at 3", "0.05"):
        receiver.receive(timeout=0.05)


def test_a_blocked_end_wakes_up_when_the_run_is_stopped(open_wire):
    stop = threading.Event()
    receiver = open_wire(abandon=stop.is_set).receiver("edge", sources=[0], target=0, layout=LAYOUT)
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(Abandoned):
        receiver.receive()
    assert time.monotonic() - began < 20
    timer.join()


def test_closing_either_end_tells_the_other(open_wire):
    sender = open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT)
    receiver = open_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT)
    sender.send(package(4), timeout=5.0)
    sender.close()
    assert number_of(receiver.receive(timeout=5.0).tree) == 4
    with raises("every-sender-closed-channel-and"):
        receiver.receive(timeout=5.0)
    with raises("was-closed"):
        sender.send(package(5), timeout=5.0)

    sender = open_wire().sender("other", source=0, targets=[0], layout=LAYOUT, capacity=1)
    receiver = open_wire().receiver("other", sources=[0], target=0, layout=LAYOUT, capacity=1)
    sender.send(package(0), timeout=5.0)
    receiver.receive(timeout=5.0)
    timer = threading.Timer(0.02, receiver.close)
    timer.start()
    with raises("receiver-was-closed"):
        sender.send(package(1), timeout=5.0)
    timer.join()


def test_a_reservation_is_written_in_place_and_published_once(open_wire):
    sender = open_wire().sender("edge", source=2, targets=[0], layout=LAYOUT)
    receiver = open_wire().receiver("edge", sources=[2], target=0, layout=LAYOUT)
    dropped = sender.reserve(timeout=5.0)
    dropped.tree["values"][:] = np.nan
    slot = sender.reserve(timeout=5.0)
    np.copyto(slot.tree["values"], 8)
    slot.tree["tag"][:] = 8
    slot.publish(version=3, iteration=4, flags=5)
    with receiver.receive(timeout=5.0) as message:
        assert number_of(message.tree) == 8
        assert message.header == (0, 2, 3, 4, 5, LAYOUT.nbytes)
    for stale in (dropped, slot):
        with raises("this-reservation-was-published-already"):
            stale.publish()
    with pytest.raises(TimedOut):
        receiver.receive(timeout=0.0)


def test_a_tree_that_does_not_fit_is_refused_and_nothing_is_sent(open_wire):
    sender = open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT)
    receiver = open_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT)
    with raises("was-expected-was-given", "values: float32[2,3]"):
        sender.send({"values": np.zeros((3,), np.float32), "tag": np.zeros((1,), np.int32)})
    sender.send(package(1), timeout=5.0)
    assert number_of(receiver.receive(timeout=5.0).tree) == 1


def test_ends_that_disagree_about_layout_or_capacity_are_refused(open_wire):
    open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    other = Layout.of({"values": np.zeros((2, 3), np.float64), "tag": np.zeros((1,), np.int32)})
    with raises("was-opened-as-and-now"):
        open_wire().receiver("edge", sources=[0], target=0, layout=other, capacity=2)
    with raises("was-opened-as-and-now"):
        open_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=3)


def test_routes_choose_the_target(open_wire):
    def sent_to(name, route, capacity=4):
        sender = open_wire().sender(
            name, source=0, targets=[5, 6, 7], layout=LAYOUT, route=route, capacity=capacity
        )
        return sender, [sender.send(package(i), timeout=5.0) for i in range(6)]

    assert sent_to("second", lambda turn, occupied: 1, capacity=6)[1] == [6] * 6
    assert sent_to("turns", None)[1] == [5, 6, 7, 5, 6, 7]
    sender, _ = sent_to("emptiest", lambda turn, occupied: occupied.index(min(occupied)))
    assert sender.send(package(6), target=6, timeout=5.0) == 6
    assert {sender.send(package(7 + i), timeout=5.0) for i in range(2)} == {5, 7}
    with raises("target-is-not-target-this", "9"):
        sender.send(package(0), target=9)


def test_sources_take_turns_and_one_can_be_asked_for(open_wire):
    receiver = open_wire().receiver("edge", sources=[0, 1, 2], target=0, layout=LAYOUT, capacity=3)
    for source in range(3):
        sender = open_wire().sender("edge", source=source, targets=[0], layout=LAYOUT, capacity=3)
        for number in range(3):
            sender.send(package(10 * source + number), timeout=5.0)
    assert eventually(lambda: all(s.depth == 3 for s in receiver.statistics().values()))
    with receiver.receive(source=1, timeout=5.0) as message:
        assert number_of(message.tree) == 10
    taken = []
    for _ in range(6):
        with receiver.receive(timeout=5.0) as message:
            taken.append(message.header.source)
    assert taken == [0, 1, 2, 0, 1, 2]
    with raises("source-is-not-source-this", "4"):
        receiver.receive(source=4)


def test_packages_are_gathered_along_an_axis_of_each_leaf(open_wire):
    receiver = open_wire().receiver("edge", sources=[0, 1], target=0, layout=LAYOUT)
    for source in (1, 0):
        sender = open_wire().sender("edge", source=source, targets=[0], layout=LAYOUT)
        sender.send(package(source + 1), version=source, timeout=5.0)
        sender.send(package(source + 3), version=source + 2, timeout=5.0)
    joined = receiver.gather(axis={"values": 1, "tag": 0}, timeout=5.0)
    np.testing.assert_array_equal(joined.tree["values"], [[1, 1, 1, 2, 2, 2]] * 2)
    assert joined.tree["tag"].tolist() == [1, 2]
    assert [header.version for header in joined.headers] == [0, 1]
    joined = receiver.gather(axis=0, sources=[1, 0], timeout=5.0)
    assert joined.tree["values"].shape == (4, 3) and joined.tree["tag"].tolist() == [4, 3]
    assert all(depth.depth == 0 for depth in receiver.statistics().values())


def test_gathering_a_count_takes_what_comes(open_wire):
    receiver = open_wire().receiver("edge", sources=[0, 1], target=0, layout=LAYOUT, capacity=4)
    sender = open_wire().sender("edge", source=1, targets=[0], layout=LAYOUT, capacity=4)
    for number in range(4):
        sender.send(package(number), timeout=5.0)
    assert receiver.gather(count=4, timeout=5.0).tree["tag"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TimedOut):
        receiver.gather(count=1, timeout=0.02)
    with raises("has-no-axis-to-concatenate", "1"):
        receiver.gather(axis=1, count=2)
    with raises("gather-count-messages-any-source"):
        receiver.gather(count=2, sources=[0])


def test_a_replaced_sender_goes_on_behind_the_last_published_message(open_wire):
    receiver = open_wire().receiver("edge", sources=[0], target=0, layout=LAYOUT, capacity=2)
    first = open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    first.send(package(0), timeout=5.0)
    with receiver.receive(timeout=5.0) as message:
        assert message.header.sequence == 0
    first.reserve(timeout=5.0).tree["values"][:] = np.nan
    second = open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=2)
    for number in range(1, 4):
        second.send(package(number), timeout=5.0)
        with receiver.receive(timeout=5.0) as message:
            assert (message.header.sequence, number_of(message.tree)) == (number, number)


@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_ranks_must_be_there_and_differ(open_wire, ranks):
    with raises("must-name-at-least-one", "targets"):
        open_wire().sender("edge", source=0, targets=ranks, layout=LAYOUT)
    with raises("must-name-at-least-one", "sources"):
        open_wire().receiver("edge", sources=ranks, target=0, layout=LAYOUT)


def test_a_channel_without_slots_is_refused(open_wire):
    with raises("capacity-must-be-at-least", "0"):
        open_wire().sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=0)
