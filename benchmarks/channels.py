"""Packages between two processes: GB/s and round trips, beside a plain copy of the same bytes.

    python benchmarks/channels.py                                  # shared memory and TCP on this host
    python benchmarks/channels.py --ray .ray/bin/python            # and Ray's object store

The producer copies each package into the channel. The consumer reads it in place, or copies it out as well. The
plain copy is `np.copyto` to one destination for each slot of the channel. Sides take turns. Ray puts each package
with `ray.put` and hands the reference to an actor, which reads it in place; one reference is in flight for each
slot.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from measure import foreign, in_turns, options, spreads, write_result

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire
from rollmill.channels.transport.handshake import new_token

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
CAPACITY = 4
WIRES = {"shared memory": MemoryWire, "TCP on loopback": TcpWire}
COPY, ACKNOWLEDGE, ECHO = 1, 2, 4
ACKNOWLEDGEMENT = Layout.of(np.zeros(1))


def layout_of(size: int) -> Layout:
    return Layout.of({"data": np.zeros(size // 4, np.float32)})


def open_wire(kind: str, address: str, token: str) -> MemoryWire | TcpWire:
    broker = RemoteBroker(address, token)
    return TcpWire(broker, token) if kind == "TCP on loopback" else MemoryWire(broker)


def consume(kind: str, address: str, token: str, size: int) -> None:
    """The other process: does with each package what its flags say."""
    wire, layout = open_wire(kind, address, token), layout_of(size)
    receiver = wire.receiver("there", sources=[0], target=0, layout=layout, capacity=CAPACITY)
    back = wire.sender("back", source=0, targets=[0], layout=layout, capacity=CAPACITY)
    done = wire.sender("done", source=0, targets=[0], layout=ACKNOWLEDGEMENT)
    own = np.ones(size // 4, np.float32)
    done.send(np.zeros(1))
    try:
        while True:
            with receiver.receive() as message:
                flags, data = message.header.flags, message.tree["data"]
                if flags & COPY:
                    np.copyto(own, data)
                if flags & ECHO:
                    back.send(message.tree)
            if flags & ACKNOWLEDGE:
                done.send(np.zeros(1))
    except ChannelClosed:
        wire.close()


class Channel:
    """The producer's side, and the consumer's process."""

    def __init__(self, kind: str, size: int) -> None:
        self._broker, token = LocalBroker(), new_token()
        self._server = BrokerServer(self._broker, token)
        command = [sys.executable, __file__, "--consume", kind, self._server.address, token, str(size)]
        self._process = subprocess.Popen(command)
        self._wire, layout = open_wire(kind, self._server.address, token), layout_of(size)
        self._sender = self._wire.sender("there", source=0, targets=[0], layout=layout, capacity=CAPACITY)
        self._back = self._wire.receiver("back", sources=[0], target=0, layout=layout, capacity=CAPACITY)
        self._done = self._wire.receiver("done", sources=[0], target=0, layout=ACKNOWLEDGEMENT)
        self._package = {"data": np.ones(size // 4, np.float32)}
        self._done.receive(timeout=60.0).release()

    def burst(self, count: int, *, flags: int) -> float:
        """Returns the seconds until the consumer is done with `count` packages."""
        began = time.perf_counter()
        for index in range(count):
            last = ACKNOWLEDGE if index == count - 1 else 0
            self._sender.send(self._package, flags=flags | last)
        self._done.receive(timeout=60.0).release()
        return time.perf_counter() - began

    def round_trip(self) -> float:
        """Returns the seconds for a package there and back."""
        began = time.perf_counter()
        self._sender.send(self._package, flags=ECHO)
        self._back.receive(timeout=60.0).release()
        return time.perf_counter() - began

    def close(self) -> None:
        """Ends the consumer."""
        self._sender.close()
        self._process.wait()
        self._wire.close()
        self._server.close()
        self._broker.close()


def copy_burst(size: int) -> Callable[[int], float]:
    """Returns a function that copies a number of times, and returns the seconds."""
    source = np.ones(size // 4, np.float32)
    destinations = [np.ones(size // 4, np.float32) for _ in range(CAPACITY)]

    def burst(count: int) -> float:
        began = time.perf_counter()
        for index in range(count):
            np.copyto(destinations[index % CAPACITY], source)
        return time.perf_counter() - began

    return burst


def measure(size: int, rounds: int, ray: str | None) -> dict[str, Any]:
    count = min(4000, max(40, (256 << 20) // size))
    channels, plain = {kind: Channel(kind, size) for kind in WIRES}, copy_burst(size)
    sides: dict[Any, Callable[[], Any]] = {"plain copy": lambda: plain(count)}
    for kind, channel in channels.items():
        sides[f"{kind}, in place"] = partial(channel.burst, count, flags=0)
        sides[f"{kind}, copied out"] = partial(channel.burst, count, flags=COPY)
    repeats = 20 if size > 1 << 20 else 200
    for kind, channel in channels.items():
        sides[kind] = lambda channel=channel: [channel.round_trip() for _ in range(repeats)]
    found = in_turns(sides, rounds, warm_up=1)  # the first round touches every page once
    for channel in channels.values():
        channel.close()
    trips = {kind: [seconds for turn in found.pop(kind) for seconds in turn] for kind in channels}
    rates = {side: [size * count / seconds / 1e9 for seconds in runs] for side, runs in found.items()}
    if ray is not None:
        order = {"size": size, "count": min(count, 1000), "rounds": rounds, "capacity": CAPACITY}
        peer = foreign(ray, "ray_object_store.py", order)
        rates["Ray object store"], trips["Ray object store"] = (
            peer["gigabytes_per_second"],
            peer["round_trip_seconds"],
        )
    return report(size, count, rates, trips)


def report(size: int, count: int, rates: dict[str, list[float]], trips: dict[str, list[float]]) -> dict[str, Any]:
    figures, plain = spreads(rates), rates["plain copy"]
    ratios = {
        f"{side} / plain copy": {
            "of medians": figures[side]["median"] / figures["plain copy"]["median"],
            "of best": max(runs) / max(plain),  # on a busy machine
        }
        for side, runs in rates.items()
        if side != "plain copy"
    }
    microseconds = {
        kind: {"median": float(np.median(runs)) * 1e6, "p90": float(np.quantile(runs, 0.9)) * 1e6}
        for kind, runs in trips.items()
    }
    best = max(rates["shared memory, in place"]), max(plain)
    print(f"best of shared memory, in place, and of plain copies: {best[0]:.2f} and {best[1]:.2f} GB/s")
    print(f"{size:,} bytes: " + ", ".join(f"{side} {f['median']:.2f} GB/s" for side, f in figures.items()))
    said = ", ".join(f"{kind} {f['median']:.0f} us" for kind, f in microseconds.items())
    print(f"  round trips: {said}", flush=True)
    found = {"bytes": size, "packages": count, "gigabytes_per_second": figures}
    return {**found, "ratios": ratios, "round_trip_microseconds": microseconds}


def main() -> None:
    consumer = ([str], "transport, address, token and bytes of a consumer: the second process of this script")
    chosen = options(__doc__, ray=(str, "a Python with ray==2.60.0 and NumPy"), rounds=7, consume=consumer)
    if chosen.consume:
        *where, size = chosen.consume
        consume(*where, int(size))
        return
    load = os.getloadavg()[0]
    rows = [measure(size, chosen.rounds, chosen.ray) for size in SIZES]
    busy = {"before": load, "after": os.getloadavg()[0]}
    write_result("channels-cpu", {"capacity": CAPACITY, "load_average": busy, "rows": rows}, chosen.output)


if __name__ == "__main__":
    main()
