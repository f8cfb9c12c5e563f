"""Processes that are killed in mid-write or while holding a message, and their replacements."""

import threading

import pytest
from channel_worker import LAYOUT, is_whole, package, reduced, reduced_layout

from rollmill.channels.errors import ChannelClosed, TimedOut

CAPACITY = 3


def test_four_producers_and_two_consumers(workers, wire_of_workers, open_wire_beside, run_together):
    count, sources = 40, [0, 1, 2, 3]
    producers = workers.hire(4)
    for source, worker in enumerate(producers):
        worker.tell("produce", wire_of_workers, name="edge", source=source, targets=[0, 1], first=0, count=count)

    def consume(target):
        receiver = open_wire_beside().receiver(
            "edge", sources=sources, target=target, layout=LAYOUT, capacity=CAPACITY
        )
        taken = []
        while True:
            try:
                message = receiver.receive(timeout=20.0)
            except ChannelClosed:
                return taken
            with message:
                assert is_whole(message.tree, message.header.source)
                assert message.header.version == 7 and int(message.tree["mark"]) == message.header.iteration
                taken.append((message.header.source, message.header.sequence, message.header.iteration))

    for target, taken in enumerate(run_together(lambda: consume(0), lambda: consume(1))):
        for source in sources:
            mine = [(sequence, iteration) for sender, sequence, iteration in taken if sender == source]
            assert mine == [(i, 2 * i + target) for i in range(count // 2)]
    for worker in producers:
        worker.hear()


def test_a_producer_killed_in_mid_write_and_its_replacement(workers, wire_of_workers, open_wire_beside):
    receiver = open_wire_beside().receiver("edge", sources=[1], target=0, layout=LAYOUT, capacity=CAPACITY)
    dying, replacement = workers.hire(2)
    options = {"name": "edge", "source": 1, "targets": [0]}
    dying.tell("produce", wire_of_workers, first=0, count=9, stop_at=2, **options)

    def take(index, sequence):
        with receiver.receive(timeout=20.0) as message:
            assert is_whole(message.tree, 1)
            assert (message.header.iteration, message.header.sequence) == (index, sequence)

    assert dying.hear() == "holding"
    take(0, 0)
    take(1, 1)
    workers.kill(dying)
    with pytest.raises(TimedOut):
        receiver.receive(timeout=0.0)
    replacement.tell("produce", wire_of_workers, first=50, count=5, **options)
    for number in range(5):
        take(50 + number, 2 + number)
    with pytest.raises(ChannelClosed):
        receiver.receive(timeout=20.0)
    replacement.hear()


def test_a_consumer_killed_while_holding_a_message_and_its_replacement(workers, wire_of_workers, open_wire_beside):
    """Taken once or not at all: what the dead one took is not seen again, and nothing comes twice."""
    dying, replacement = workers.hire(2)
    dying.tell("consume", wire_of_workers, name="edge", target=0, sources=[0], hold_at=3)
    wire = open_wire_beside()
    sender = wire.sender("edge", source=0, targets=[0], layout=LAYOUT, capacity=CAPACITY, checksum=True)
    for index in range(3):
        sender.send(package(0, index), iteration=index, timeout=20.0)
    taken = dying.hear()
    assert taken == [[0, index, index] for index in range(3)] and dying.hear() == "holding"
    sender.send(package(0, 3), iteration=3, timeout=20.0)
    workers.kill(dying)
    replacement.tell("consume", wire_of_workers, name="edge", target=0, sources=[0])
    for index in range(4, 12):
        sender.send(package(0, index), iteration=index, timeout=20.0)
    sender.close()
    rest = replacement.hear()
    numbers = [iteration for _, _, iteration in rest]
    assert numbers == list(range(numbers[0], 12))
    if wire_of_workers[0] == "memory":
        assert numbers[0] == 3
    else:
        assert numbers[0] in (3, 4)  # the one on its way to the dead process went with it
    assert [sequence for _, sequence, _ in rest] == numbers


def test_a_writer_killed_in_mid_write_leaves_the_last_version(workers, wire_of_workers, open_wire_beside):
    reader = open_wire_beside().latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
    dying, replacement = workers.hire(2)
    dying.tell("publish", wire_of_workers, name="weights", readers=1, first=1, count=6, stop=True)
    assert dying.hear() == "holding"
    assert reader.read(at_least=6, timeout=20.0).version == 6
    workers.kill(dying)
    found = reader.read()
    assert found.version == 6 and is_whole(found.tree, 0)
    replacement.tell("publish", wire_of_workers, name="weights", readers=1, first=7, count=2, stop=True)
    found = reader.read(at_least=7, timeout=20.0)
    assert found.version in (7, 8) and is_whole(found.tree, 0)
    workers.kill(replacement)


def test_a_killed_rank_gives_nobody_a_mean(workers, wire_of_workers, open_wire_beside):
    steps, dying = 4, workers.hire()[0]
    dying.tell("reduce", wire_of_workers, name="g", rank=1, size=2, steps=9, stop_at=steps)
    own = open_wire_beside().reduction("g", rank=0, size=2, layout=reduced_layout())
    for step in range(steps):
        mean = own.mean(reduced(0, step), step=step, timeout=20.0)
        expected = [(a + b) / type(a.flat[0])(2) for a, b in zip(reduced(0, step), reduced(1, step), strict=True)]
        assert [leaf.tobytes() for leaf in mean] == [leaf.tobytes() for leaf in expected]
    assert dying.hear() == "holding"
    timer = threading.Timer(0.05, workers.kill, [dying])
    timer.start()
    with pytest.raises((TimedOut, ChannelClosed)):
        own.mean(reduced(0, steps), step=steps, timeout=0.5)
    timer.join()
