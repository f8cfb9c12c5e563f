"""One ring: every order of sending, taking, releasing, dying and being replaced, against a list."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.errors import Damaged
from rollmill.channels.layout import Layout
from rollmill.channels.protocols import Header
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import Ring, ring_bytes
from rollmill.channels.shm.ring_reader import RingReader
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.shm.wire import BrokerHolders
from wordings import raises

LAYOUT = Layout.of([np.zeros(3, np.int64)])


class Ends:
    """A ring and both its ends, each of which can be replaced by a new one on the same memory."""

    def __init__(self, capacity, *, checksum=False):
        self.broker = LocalBroker()
        self.capacity = capacity
        self.checksum = checksum
        self.bell = Doorbell.create()
        self.new_writer()
        self.new_reader()

    def ring(self):
        memory = self.broker.segment("ring", nbytes=ring_bytes(LAYOUT, self.capacity), digest="d")
        return Ring(memory, LAYOUT, self.capacity, BrokerHolders(self.broker, "ring", "d"))

    def close(self):
        self.bell.close()
        self.broker.close()

    def new_writer(self):
        self.writer = RingWriter(self.ring(), source=5, doorbell=self.bell, checksum=self.checksum, name="edge")

    def new_reader(self):
        self.reader = RingReader(self.ring(), doorbell=self.bell, name="edge")

    def write(self, value):
        LAYOUT.fill(self.writer.views(), [np.full(3, value)])

    def send(self, value):
        self.write(value)
        self.writer.publish(version=value + 1, iteration=value, flags=value % 7)


@pytest.fixture
def make_ends():
    made = []

    def make(*arguments, **options):
        made.append(Ends(*arguments, **options))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def value_of(message):
    values = message.tree[0]
    assert (values == values[0]).all()
    return int(values[0])


class Model:
    """A model of a ring, beside a real one that does the same."""

    def __init__(self, capacity):
        self.ends = Ends(capacity)
        self.capacity = capacity
        self.waiting, self.held, self.sent = deque(), [], 0

    def has_room(self):
        return len(self.waiting) + len(self.held) < self.capacity

    def send(self):
        if self.has_room():
            self.ends.send(self.sent)
            self.waiting.append(self.sent)
            self.sent += 1

    def die_in_mid_write(self):
        if self.has_room():
            self.ends.write(-1)
            self.ends.new_writer()

    def take(self):
        message = self.ends.reader.take()
        assert (message is None) == (not self.waiting)
        if message is not None:
            n = self.waiting.popleft()
            assert value_of(message) == n
            assert message.header == Header(n, 5, n + 1, n, n % 7, LAYOUT.nbytes)
            self.held.append(message)

    def release(self):
        if self.held:
            self.held.pop(0).release()

    def replace_writer(self):
        self.ends.new_writer()

    def replace_reader(self):
        self.ends.new_reader()
        self.held.clear()  # what the dead one held is never seen again

    def check(self):
        assert self.ends.writer.has_room() == self.has_room()
        for message in self.held:
            assert value_of(message) == message.header.iteration  # nobody writes to what is held


ACTIONS = [
    Model.send,
    Model.die_in_mid_write,
    Model.take,
    Model.release,
    Model.replace_writer,
    Model.replace_reader,
]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_the_ring_is_a_bounded_queue_that_outlives_its_ends(capacity, actions):
    model = Model(capacity)
    for action in actions:
        action(model)
        model.check()
    model.ends.close()


@given(st.permutations(range(4)))
def test_messages_released_in_any_order_free_their_slots_in_order(order):
    ends = Ends(4)
    for value in range(4):
        ends.send(value)
    messages = [ends.reader.take() for _ in range(4)]
    for count, index in enumerate(order):
        messages[index].release()
        messages[index].release()  # a second time does nothing
        released = set(order[: count + 1])
        free = next((i for i in range(4) if i not in released), 4)
        assert ends.writer.occupied == 4 - free
    ends.close()


def test_a_copy_outlives_the_slot_and_a_view_does_not(make_ends):
    ends = make_ends(1)
    ends.send(1)
    with ends.reader.take() as message:
        copy, view = message.copy(), message.tree
        with pytest.raises(ValueError, match="read-only"):
            view[0][0] = 9
    ends.send(2)
    assert copy[0].tolist() == [1, 1, 1]
    assert view[0].tolist() == [2, 2, 2]
    assert copy[0].ctypes.data % 64 == 0 and view[0].ctypes.data % 64 == 0


def test_an_end_that_was_replaced_can_do_nothing_more(make_ends):
    ends = make_ends(2)
    ends.send(1)
    old_writer, old_reader = ends.writer, ends.reader
    held = old_reader.take()
    ends.new_writer()
    ends.new_reader()
    with raises("another-producer-took-this-ones"):
        old_writer.has_room()
    ends.send(2)
    with raises("another-receiver-took-this-ones"):
        old_reader.take()
    taken = ends.reader.take()
    held.release()  # of the old one: must not free the slot that the new one holds
    assert ends.writer.occupied == 1 and value_of(taken) == 2


def test_the_end_is_seen_after_the_last_message(make_ends):
    ends = make_ends(2)
    ends.send(1)
    ends.writer.close()
    assert ends.reader.ended and value_of(ends.reader.take()) == 1
    assert ends.reader.take() is None
    with raises("was-closed", "sender"):
        ends.writer.has_room()
    ends.new_writer()
    assert not ends.reader.ended


def test_a_payload_that_changed_is_damaged_and_then_passed_over(make_ends):
    ends = make_ends(3, checksum=True)
    for value in range(3):
        ends.send(value)
    slot = ends.ring().section(1).slots[1]
    slot.payload[8] ^= 1
    assert value_of(ends.reader.take()) == 0
    with raises("message-is-corrupt-is-worker", "1"):
        ends.reader.take()
    assert value_of(ends.reader.take()) == 2


def test_a_slot_that_is_being_overwritten_is_damaged(make_ends):
    ends = make_ends(2)
    ends.send(0)
    ends.ring().section(1).slots[0].stamp[0] = 0  # as a producer that was believed dead marks what it writes
    with pytest.raises(Damaged):
        ends.reader.take()
    assert ends.writer.occupied == 0


def test_counters_go_on_when_ends_are_replaced(make_ends):
    ends = make_ends(2)
    for value in range(5):
        ends.send(value)
        ends.reader.take().release()
        ends.new_writer()
        ends.new_reader()
    ends.send(5)
    assert ends.writer.statistics() == (6, 1)
    assert ends.reader.statistics() == (5, 1)
