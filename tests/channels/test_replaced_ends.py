"""Ends that die, stand still and are replaced at any moment, against a model of what may be delivered.

The first machine stops an end of a ring in memory at any of its fences, which are the only places where the order
of its steps matters, lets others go on, and then wakes it up. The second one does the same to all that an end of a
wire does, over memory and TCP alike, where a stopped end neither sends nor reads.
"""

import contextlib
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.errors import ChannelClosed, ConnectionLost, Damaged, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import Ring, ring_bytes
from rollmill.channels.shm.ring_reader import RingReader
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.shm.wire import BrokerHolders, MemoryWire
from rollmill.channels.tcp import receiving, sending
from rollmill.channels.tcp.wire import TcpWire

LAYOUT = Layout.of([np.zeros(3, np.int64)])
SECONDS = 20.0
WAIT = 0.3
UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def package(sender, number):
    return [np.array([sender, number, 7 * sender + number])]


class Deliveries:
    """Messages that were sent and delivered; one is the incarnation of its sender and its number there."""

    def __init__(self):
        self.sent = set()
        self.taken = set()
        self.sequences = set()
        self.last = {}

    def take(self, receiver, message):
        """Notes a message as soon as it was taken, and looks at its content after that."""
        header = message.header
        sender, number = header.version, header.iteration
        assert (sender, number) not in self.taken, f"{(sender, number)} was delivered twice"
        assert header.sequence not in self.sequences, f"sequence {header.sequence} was delivered twice"
        assert number > self.last.get((receiver, sender), -1), "out of order"
        self.taken.add((sender, number))
        self.sequences.add(header.sequence)
        self.last[receiver, sender] = number
        assert message.copy()[0].tolist() == package(sender, number)[0].tolist(), "torn"

    @property
    def lost(self):
        return self.sent - self.taken


# --- at any instruction ----------------------------------------------------------------------------------


class StoppingFence:
    """A fence at which its end can be stopped."""

    def __init__(self):
        self.left = -1
        self.is_stopped = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            self.is_stopped.set()
            assert self.goes_on.wait(SECONDS)


class Act:
    """One operation of one end, in a thread that may be stopped in its middle."""

    def __init__(self, end, operation, stop_at, errors):
        self.end = end
        self._errors = errors
        self._fence = fence = end._fence = StoppingFence()
        fence.left = stop_at
        self._thread = threading.Thread(target=self._run, args=(operation,))
        self._thread.start()
        while self._thread.is_alive() and not fence.is_stopped.is_set():
            time.sleep(0.0002)

    @property
    def is_over(self):
        return not self._thread.is_alive()

    def wake_up(self):
        self._fence.goes_on.set()
        self._thread.join()

    def _run(self, operation):
        try:
            with contextlib.suppress(ChannelClosed):
                operation()
        except (AssertionError, Damaged) as error:
            self._errors.append(error)
        self._fence.left = -1  # whatever this end does next is not stopped


class StoppedInstructions(RuleBasedStateMachine):
    """A ring in memory, whose ends are stopped in the middle of what they do, and replaced before they go on."""

    @initialize(capacity=st.integers(1, 3))
    def begin(self, capacity):
        self.capacity = capacity
        self.broker, self.bell = LocalBroker(), Doorbell.create()
        self.deliveries, self.incarnations = Deliveries(), Counter()
        self.asleep, self.errors = [], []
        self.may_be_lost = 0
        self.replace_writer()
        self.replace_reader()

    def ring(self):
        memory = self.broker.segment("ring", nbytes=ring_bytes(LAYOUT, self.capacity), digest="d")
        return Ring(memory, LAYOUT, self.capacity, BrokerHolders(self.broker, "ring", "d"))

    @rule()
    def replace_writer(self):
        self.incarnations["writer"] += 1
        self.may_be_lost += 1  # the one that it is just publishing
        self.number = 0
        self.writer = RingWriter(self.ring(), source=0, doorbell=self.bell, checksum=False, name="ring")

    @rule()
    def replace_reader(self):
        self.incarnations["reader"] += 1
        self.may_be_lost += 1  # the one that it is just taking
        self.held = []
        self.reader = RingReader(self.ring(), doorbell=self.bell, name="ring")

    @rule(stop_at=st.integers(0, 4))
    def send(self, stop_at):
        writer, sender, number = self.writer, self.incarnations["writer"], self.number
        self.number += 1

        def operation():
            if writer.has_room():
                LAYOUT.fill(writer.views(), package(sender, number))
                self.deliveries.sent.add((sender, number))
                writer.publish(version=sender, iteration=number, flags=0)

        self.act(writer, operation, stop_at)

    @rule(stop_at=st.integers(0, 7), release=st.booleans())
    def take(self, stop_at, release):
        reader, name, held = self.reader, self.incarnations["reader"], self.held

        def operation():
            if (message := reader.take()) is not None:
                self.deliveries.take(name, message)
                message.release() if release else held.append(message)

        self.act(reader, operation, stop_at)

    @precondition(lambda self: self.held)
    @rule()
    def release(self):
        if not self.is_asleep(self.reader):
            self.held.pop(0).release()

    @precondition(lambda self: self.asleep)
    @rule(data=st.data())
    def wake_up(self, data):
        self.asleep.pop(data.draw(st.integers(0, len(self.asleep) - 1))).wake_up()
        self.raise_errors()

    def act(self, end, operation, stop_at):
        if self.is_asleep(end):
            return
        act = Act(end, operation, stop_at, self.errors)
        if not act.is_over:
            self.asleep.append(act)
        self.raise_errors()

    def is_asleep(self, end):
        return any(act.end is end for act in self.asleep)

    def raise_errors(self):
        for error in self.errors:
            raise error

    def teardown(self):
        if not hasattr(self, "broker"):
            return
        try:
            for act in self.asleep:
                act.wake_up()
            self.raise_errors()
            self.replace_reader()
            while (message := self.reader.take()) is not None:
                self.deliveries.take("last", message)
                message.release()
            assert len(self.deliveries.lost) <= self.may_be_lost
        finally:
            self.bell.close()
            self.broker.close()


TestStoppedInstructions = StoppedInstructions.TestCase
TestStoppedInstructions.settings = settings(max_examples=40, stateful_step_count=40, **UNHURRIED)


# --- whole ends, over memory and TCP ---------------------------------------------------------------------


class Gate:
    """Stands for a stopped process: nothing is sent on its connections and nothing read until it goes on."""

    def __init__(self):
        self.is_dead = False
        self.is_open = threading.Event()
        self.is_open.set()

    def passes(self, function):
        def gated(*arguments, **options):
            assert self.is_open.wait(3 * SECONDS)
            if self.is_dead:
                raise ConnectionLost("its process is dead")
            return function(*arguments, **options)

        return gated

    def guard(self, connection):
        connection.send = self.passes(connection.send)
        connection.receive_some = self.passes(connection.receive_some)
        return connection

    def install(self, hub):
        dial, announce = hub.dial, hub.announce

        def gated_dial(end, **hello):
            assert self.is_open.wait(3 * SECONDS)
            dialled = None if self.is_dead else dial(end, **hello)
            return dialled and (self.guard(dialled[0]), dialled[1])

        def gated_announce(end, serve, incarnation):
            announce(end, lambda connection, hello: serve(self.guard(connection), hello), incarnation)

        hub.dial, hub.announce = gated_dial, gated_announce


class Holder:
    """An end, and the wire and broker of its process."""

    def __init__(self, kind, server, token, side, capacity, incarnation):
        self.incarnation, self.number, self.held = incarnation, 0, []
        self.gate = Gate()
        self.broker = RemoteBroker(server.address if kind == "memory" else server.tcp_address, token)
        self.wire = MemoryWire(self.broker) if kind == "memory" else TcpWire(self.broker, token)
        if kind == "tcp":
            self.gate.install(self.wire._hub)
        options = {"layout": LAYOUT, "capacity": capacity}
        if side == "sender":
            self.end = self.wire.sender("edge", source=0, targets=[0], **options)
        else:
            self.end = self.wire.receiver("edge", sources=[0], target=0, **options)

    @property
    def is_stopped(self):
        return not self.gate.is_open.is_set()

    def die(self):
        self.gate.is_dead = True
        self.gate.is_open.set()
        self.wire.close()
        self.broker.close()


class ReplacedEnds(RuleBasedStateMachine):
    """A sender and a receiver, each of which has successors, while it lives, stands still, or is dead."""

    kind = "memory"

    @initialize(capacity=st.integers(1, 3))
    def begin(self, capacity):
        self.capacity = capacity
        self.broker = LocalBroker()
        self.server = BrokerServer(self.broker, "token", host="127.0.0.1")
        self.deliveries, self.incarnations = Deliveries(), Counter()
        self.holders, self.replaced = {}, []
        self.disturbances = 0
        for side in ("sender", "receiver"):
            self.open(side)

    def open(self, side):
        self.incarnations[side] += 1
        self.holders[side] = Holder(self.kind, self.server, "token", side, self.capacity, self.incarnations[side])

    @rule(side=st.sampled_from(["sender", "receiver"]))
    def replace(self, side):
        """The one before lives on, and may stand still."""
        self.disturbances += 1
        self.replaced.append((side, self.holders[side]))
        self.open(side)

    @rule(sides=st.sampled_from([["sender"], ["receiver"], ["sender", "receiver"], ["receiver", "sender"]]))
    def kill(self, sides):
        for side in sides:
            self.disturbances += 1
            self.holders[side].die()
        for side in sides:
            self.open(side)

    @rule(side=st.sampled_from(["sender", "receiver"]))
    def stop(self, side):
        self.holders[side].gate.is_open.clear()

    @rule(side=st.sampled_from(["sender", "receiver"]))
    def go_on(self, side):
        self.holders[side].gate.is_open.set()

    @rule(count=st.integers(1, 4))
    def send(self, count):
        for _ in range(count):
            self.try_to_send(self.holders["sender"])

    @rule(count=st.integers(1, 4), release=st.booleans(), patient=st.booleans())
    def take(self, count, release, patient):
        """Between hosts messages take a while: a patient receiver waits for one that may be on its way."""
        receiver, until = self.holders["receiver"], time.monotonic() + patient * WAIT
        known = len(self.deliveries.taken)
        self.try_to_take(receiver, release)
        while self.may_arrive() and known == len(self.deliveries.taken) and time.monotonic() < until:
            time.sleep(0.002)
            self.try_to_take(receiver, release)
        for _ in range(count - 1):
            self.try_to_take(receiver, release)

    def may_arrive(self):
        sender, receiver = self.holders["sender"], self.holders["receiver"]
        own = {message for message in self.deliveries.lost if message[0] == sender.incarnation}
        return bool(own) and not sender.is_stopped and not receiver.is_stopped and not receiver.held

    @rule()
    def release(self):
        holder = self.holders["receiver"]
        if not holder.is_stopped and holder.held:
            holder.held.pop(0).release()

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def wake_up_a_replaced_one(self, data):
        side, holder = self.replaced.pop(data.draw(st.integers(0, len(self.replaced) - 1)))
        holder.gate.is_open.set()
        time.sleep(0.01)
        with contextlib.suppress(ChannelClosed):
            for _ in range(self.capacity + 1):
                self.try_to_send(holder) if side == "sender" else self.try_to_take(holder, release=True)
        self.disturbances += 1  # some of these may have been sent
        holder.die()

    def try_to_send(self, holder):
        if holder.is_stopped:
            return
        message = (holder.incarnation, holder.number)
        with contextlib.suppress(TimedOut):
            holder.end.send(package(*message), version=message[0], iteration=message[1], timeout=0.0)
            self.deliveries.sent.add(message)
            holder.number += 1

    def try_to_take(self, holder, release):
        if holder.is_stopped:
            return
        with contextlib.suppress(TimedOut):
            message = holder.end.receive(timeout=0.0)
            self.deliveries.take(holder.incarnation, message)
            message.release() if release else holder.held.append(message)

    def teardown(self):
        if not hasattr(self, "server"):
            return
        try:
            self.settle()
            assert len(self.deliveries.lost) <= self.capacity * self.disturbances
        finally:
            for holder in [*self.holders.values(), *(holder for _, holder in self.replaced)]:
                holder.die()
            self.server.close()
            self.broker.close()

    def settle(self):
        """All stand up; what is sent from now on arrives, and so does all before it that was not lost."""
        sender, receiver = self.holders["sender"], self.holders["receiver"]
        for holder in [sender, receiver, *(holder for _, holder in self.replaced)]:
            holder.gate.is_open.set()
        for message in receiver.held:
            message.release()
        first, until = sender.number, time.monotonic() + SECONDS
        while not any((sender.incarnation, n) in self.deliveries.taken for n in range(first, sender.number)):
            assert time.monotonic() < until, "nothing goes on"
            self.try_to_send(sender)  # again and again: it may still believe in a receiver that was replaced
            self.try_to_take(receiver, release=True)
            time.sleep(0.001)
        while (sender.incarnation, sender.number - 1) not in self.deliveries.taken:
            assert time.monotonic() < until, "what was sent behind a message that arrived does not arrive"
            self.try_to_take(receiver, release=True)
            time.sleep(0.001)


class ReplacedTcpEnds(ReplacedEnds):
    kind = "tcp"


@pytest.mark.parametrize("machine", [ReplacedEnds, pytest.param(ReplacedTcpEnds, marks=pytest.mark.slow)])
def test_ends_that_die_stop_and_are_replaced(machine, monkeypatch):
    for module in (sending, receiving):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    run_state_machine_as_test(machine, settings=settings(max_examples=16, stateful_step_count=25, **UNHURRIED))
