"""A process that does what the test tells it by lines of JSON, and can be killed at any of them."""

import json
import sys
import time

import numpy as np

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire

SHAPE = (61, 7)
LAYOUT = Layout.of({"data": np.zeros(SHAPE, np.float32), "mark": np.zeros((), np.int64)})


def package(source, index):
    """Message number `index` of producer `source`: every element says both."""
    return {"data": np.full(SHAPE, 1000 * source + index, np.float32), "mark": np.int64(index)}


def is_whole(tree, source):
    return bool((tree["data"] == 1000 * source + float(tree["mark"])).all())


def open_wire(kind, address, token):
    broker = RemoteBroker(address, token)
    return MemoryWire(broker) if kind == "memory" else TcpWire(broker, token)


def hold(say):
    """Says that the moment has come, and waits for the kill."""
    say("holding")
    time.sleep(60)


def produce(wire, say, *, name, source, targets, first, count, stop_at=None, capacity=3):
    sender = wire.sender(name, source=source, targets=targets, layout=LAYOUT, capacity=capacity, checksum=True)
    for index in range(first, first + count):
        if index == stop_at:
            sender.reserve(timeout=20.0).tree["data"][:30] = np.nan  # half of it
            hold(say)
        sender.send(package(source, index), iteration=index, version=7, timeout=20.0)
    if stop_at is None:
        sender.close()
    return {source: target.messages for source, target in sender.statistics().items()}


def consume(wire, say, *, name, target, sources, hold_at=None, capacity=3):
    receiver = wire.receiver(name, sources=sources, target=target, layout=LAYOUT, capacity=capacity)
    taken = []
    while True:
        try:
            message = receiver.receive(timeout=20.0)
        except ChannelClosed:
            return taken
        with message:
            header = message.header
            if not is_whole(message.tree, header.source):
                raise ValueError(f"torn: {header}")
            taken.append([header.source, header.sequence, header.iteration])
            if hold_at == len(taken):
                say(taken)
                hold(say)


def publish(wire, say, *, name, readers, first, count, stop=False):
    writer = wire.latest_writer(name, layout=LAYOUT, readers=readers)
    for version in range(first, first + count):
        writer.publish(package(0, version), version=version)
    if stop:
        writer.begin()[:400] = b"\xff" * 400  # half of it
        hold(say)
    return first + count - 1


def reduce(wire, say, *, name, rank, size, steps, stop_at=None):
    reduction = wire.reduction(name, rank=rank, size=size, layout=reduced_layout())
    digests = []
    for step in range(steps):
        if step == stop_at:
            hold(say)
        mean = reduction.mean(reduced(rank, step), step=step, timeout=20.0)
        digests.append([leaf.tobytes().hex()[:400] for leaf in mean])
    return digests


def reduced(rank, step):
    random = np.random.default_rng([rank, step])
    return [random.normal(size=(40,)).astype(np.float32), random.normal(size=(5, 3))]


def reduced_layout():
    return Layout.of(reduced(0, 0))


ROLES = {"produce": produce, "consume": consume, "publish": publish, "reduce": reduce}


def main():
    def say(value, *, is_idle=False):
        print(json.dumps([value, is_idle]), flush=True)

    say("ready", is_idle=True)
    for line in sys.stdin:
        command = json.loads(line)
        wire = open_wire(*command.pop("wire"))
        result = ROLES[command.pop("role")](wire, say, **command)
        wire.close()
        say(result, is_idle=True)


if __name__ == "__main__":
    main()
