"""The processes of `rings.py`: producers and consumers that log what they sent and took, and may be killed.

Their logs are files of fixed-size records, appended by one system call each: what a process wrote before it was
killed is there, and nothing else.
"""

import os
import random
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.errors import ChannelClosed, Damaged, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire

FENCED = 3
"""Exit code of an end that noticed that another one took its place."""

SENT = struct.Struct("<q")
"""Number of the message, counted by one process and for one target."""

TAKEN = struct.Struct("<qqqqq")
"""Number of the producing process, number of the message, its source, its sequence, and its condition."""

WHOLE, TORN, DAMAGED = 1, 2, 3
WAIT = 0.5


class End(NamedTuple):
    """One process: an end of the channel, as one of its successive holders."""

    transport: str
    address: str
    token: str
    folder: str
    process: int
    """Counts all processes of a run."""
    rank: int
    peers: int
    nbytes: int
    capacity: int
    pause: float
    """At most so many seconds of rest after each message."""


def layout_of(nbytes: int) -> Layout:
    return Layout.of({"head": np.zeros(4, np.int64), "data": np.zeros(max(1, nbytes // 8), np.int64)})


def open_wire(end: End) -> MemoryWire | TcpWire:
    broker = RemoteBroker(end.address, end.token)
    return MemoryWire(broker) if end.transport == "memory" else TcpWire(broker, end.token)


def is_open(end: End) -> bool:
    """Returns whether the process has taken its end over; before that, its successor may come first."""
    return Path(end.folder, f"open-{end.process}").exists()


def is_over(end: End) -> bool:
    return Path(end.folder, "over").exists()


def open_log(end: End, name: str) -> int:
    return os.open(Path(end.folder, name), os.O_CREAT | os.O_APPEND | os.O_WRONLY)


def least_filled(turn: int, occupied: Sequence[int]) -> int:
    """Route to the target with the fewest messages, in turn among equals; waits only when all are full."""
    count = len(occupied)
    return min(range(count), key=lambda index: (occupied[index], (index - turn) % count))


def produce(end: End) -> None:
    """Sends numbered messages to whichever target has room, until told to end."""
    rng, pattern = random.Random(end.process), np.arange(max(1, end.nbytes // 8), dtype=np.int64)
    logs = [open_log(end, f"sent-{end.process}-{end.rank}-{target}") for target in range(end.peers)]
    counts = [0] * end.peers
    wire = open_wire(end)
    targets = list(range(end.peers))
    shape = {"layout": layout_of(end.nbytes), "capacity": end.capacity}
    sender = wire.sender("ring", source=end.rank, targets=targets, route=least_filled, **shape)
    Path(end.folder, f"open-{end.process}").touch()
    try:
        while not is_over(end):
            try:
                reservation = sender.reserve(timeout=WAIT)
            except TimedOut:
                continue
            target = reservation.target
            data = pattern + (end.process * 1_000_003 + counts[target]) * 7_777_777
            head = [end.process, counts[target], target, zlib.crc32(data)]
            reservation.tree["data"][:] = data
            reservation.tree["head"][:] = head
            reservation.publish(iteration=counts[target])
            os.write(logs[target], SENT.pack(counts[target]))
            counts[target] += 1
            time.sleep(rng.uniform(0, end.pause))
        sender.close()
        wire.finish() if isinstance(wire, TcpWire) else wire.close()
    except ChannelClosed:
        leave(end)


def consume(end: End) -> None:
    """Takes, checks and logs messages until every sender has closed."""
    rng = random.Random(end.process)
    log = open_log(end, f"taken-{end.process}-{end.rank}")
    shape = {"layout": layout_of(end.nbytes), "capacity": end.capacity}
    receiver = open_wire(end).receiver("ring", sources=list(range(end.peers)), target=end.rank, **shape)
    Path(end.folder, f"open-{end.process}").touch()
    try:
        while True:
            try:
                message = receiver.receive(timeout=WAIT)
            except TimedOut:
                if is_over(end) and Path(end.folder, "drained").exists():
                    return
                continue
            except Damaged:
                os.write(log, TAKEN.pack(-1, -1, -1, -1, DAMAGED))
                continue
            with message:
                tree, header = message.copy(), message.header
                process, number, target, checksum = map(int, tree["head"])
                whole = zlib.crc32(tree["data"]) == checksum and (target, number) == (end.rank, header.iteration)
                os.write(
                    log, TAKEN.pack(process, number, header.source, header.sequence, WHOLE if whole else TORN)
                )
            time.sleep(rng.uniform(0, end.pause))
    except ChannelClosed:
        leave(end)


def leave(end: End) -> None:
    sys.stdout.flush()
    os._exit(0 if is_over(end) else FENCED)
