"""The latest-value channel over every wire: never torn, never waiting for a reader."""

import threading
import time

import numpy as np
import pytest

from rollmill.channels.errors import Abandoned, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.latest import BoardReader, BoardWriter, SeqlockBoard, board_bytes
from rollmill.channels.shm.memory import private_memory
from rollmill.channels.waiting import Waiter, never
from wordings import raises

LAYOUT = Layout.of({"w": np.zeros((100, 50), np.float32), "b": np.zeros((7,), np.float64)})


def weights(version):
    return {"w": np.full((100, 50), version, np.float32), "b": np.full((7,), version, np.float64)}


def is_whole(found):
    return bool((found.tree["w"] == found.version).all() and (found.tree["b"] == found.version).all())


def test_readers_see_whole_versions_that_never_go_back_under_a_fast_writer(open_wire, run_together):
    last = 400

    def write():
        writer = open_wire().latest_writer("weights", layout=LAYOUT, readers=2)
        for version in range(1, last + 1):
            writer.publish(weights(version), version=version)
        writer.close()

    def read(index):
        reader = open_wire().latest_reader("weights", layout=LAYOUT, reader=index, readers=2)
        seen = [0]
        while seen[-1] < last:
            found = reader.read(at_least=seen[-1] + 1, timeout=10.0)
            assert is_whole(found)
            seen.append(found.version)
        return seen

    _, *seen = run_together(write, lambda: read(0), lambda: read(1))
    for versions in seen:
        assert versions == sorted(versions) and versions[-1] == last


def test_a_read_waits_for_the_version_it_asks_for(open_wire):
    writer = open_wire().latest_writer("weights", layout=LAYOUT, readers=1)
    reader = open_wire().latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
    assert reader.version() is None
    with raises("nothing-happened-within-s", "reading weights at 0"):
        reader.read(timeout=0.02)
    writer.publish(weights(3), version=3)
    assert reader.read(at_least=3, timeout=5.0).version == 3
    assert reader.version() == 3
    with pytest.raises(TimedOut):
        reader.read(at_least=4, timeout=0.02)
    timer = threading.Timer(0.05, lambda: writer.publish(weights(5), version=5))
    timer.start()
    found = reader.read(at_least=4, timeout=5.0)
    assert found.version == 5 and is_whole(found)
    timer.join()


def test_what_was_read_is_the_readers_own(open_wire):
    writer = open_wire().latest_writer("weights", layout=LAYOUT, readers=1)
    reader = open_wire().latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
    writer.publish(weights(1), version=1)
    first = reader.read(timeout=5.0)
    for version in range(2, 12):
        writer.publish(weights(version), version=version)
    reader.read(at_least=11, timeout=5.0)
    assert is_whole(first)
    assert first.tree["w"].ctypes.data % 64 == 0


def test_a_reader_that_comes_late_or_again_finds_the_newest(open_wire):
    writer = open_wire().latest_writer("weights", layout=LAYOUT, readers=1)
    for version in (1, 2):
        writer.publish(weights(version), version=version)
    for _ in range(2):
        reader = open_wire().latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
        assert reader.read(at_least=2, timeout=5.0).version == 2


def test_closing_lets_the_last_version_stand_and_another_writer_go_on(open_wire):
    writer = open_wire().latest_writer("weights", layout=LAYOUT, readers=1)
    reader = open_wire().latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
    writer.publish(weights(1), version=1)
    writer.close()
    assert reader.read(at_least=1, timeout=5.0).version == 1
    with raises("writer-closed-channel-before-version", "2"):
        reader.read(at_least=2, timeout=5.0)
    assert is_whole(reader.read())
    second = open_wire().latest_writer("weights", layout=LAYOUT, readers=1)
    second.publish(weights(2), version=2)
    until = time.monotonic() + 5
    while reader.version() != 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert is_whole(reader.read(at_least=2))


def test_a_waiting_reader_wakes_up_when_the_run_is_stopped(open_wire):
    reader = open_wire(abandon=lambda: True).latest_reader("weights", layout=LAYOUT, reader=0, readers=1)
    with pytest.raises(Abandoned):
        reader.read()


def test_readers_are_numbered(open_wire):
    with raises("must-be-from-0-to", "reader", "2"):
        open_wire().latest_reader("weights", layout=LAYOUT, reader=2, readers=2)


@pytest.fixture
def board():
    memory, bell = private_memory(board_bytes(LAYOUT)), Doorbell.create()
    yield lambda: (SeqlockBoard(memory, LAYOUT), bell)
    bell.close()


def test_a_writer_that_dies_in_mid_write_leaves_the_last_whole_version(board):
    parts, bell = board()
    reader = BoardReader(parts, Waiter(bell, never, "reading"), "weights")
    for version in range(1, 8):  # whichever slot is next
        dying = BoardWriter(board()[0], [bell], "weights")
        dying.publish(weights(version), version=version)
        dying.begin()[:] = b"\xff" * LAYOUT.nbytes
        found = reader.read()
        assert found.version == version and is_whole(found)
        with raises("another-writer-took-this-ones"):
            BoardWriter(board()[0], [bell], "weights")
            dying.publish(weights(99), version=99)


def test_a_copy_that_the_writer_laps_is_not_taken(board):
    parts, bell = board()
    writer = BoardWriter(board()[0], [bell], "weights")
    reader = BoardReader(parts, Waiter(bell, never, "reading"), "weights")
    writer.publish(weights(1), version=1)
    seen = reader.newest()
    buffer = np.zeros(LAYOUT.nbytes, np.uint8)
    for version in range(2, 5):
        writer.publish(weights(version), version=version)
    assert reader.copy_into(buffer, seen)  # three more versions have room beside it
    writer.begin()
    assert not reader.copy_into(buffer, seen)
    assert reader.read().version == 4
