"""Packages between two processes: GB/s and round trips, beside a plain copy of the same bytes.

    python benchmarks/channels.py                                  # shared memory and TCP on this host
    python benchmarks/channels.py --ray .ray/bin/python            # and Ray's object store

The producer copies each package into the channel; the consumer looks at it where it lies ("in place"),
or copies it out besides ("copied out"). The plain copy is `np.copyto` to as many destinations as
the channel has slots. Sides take turns, so that a machine whose speed drifts slows all of them alike.
Ray puts each package with `ray.put` and hands the reference to an actor, which gets it in place; as
many references are under way as the channel has slots.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import RESULTS, spread, write_result

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
        """Seconds until the consumer is done with so many packages."""
        began = time.perf_counter()
        for index in range(count):
            last = ACKNOWLEDGE if index == count - 1 else 0
            self._sender.send(self._package, flags=flags | last)
        self._done.receive(timeout=60.0).release()
        return time.perf_counter() - began

    def round_trip(self) -> float:
        """Seconds for a package there and back."""
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
    """Seconds for so many plain copies."""
    source = np.ones(size // 4, np.float32)
    destinations = [np.ones(size // 4, np.float32) for _ in range(CAPACITY)]

    def burst(count: int) -> float:
        began = time.perf_counter()
        for index in range(count):
            np.copyto(destinations[index % CAPACITY], source)
        return time.perf_counter() - began

    return burst


def num_packages(size: int) -> int:
    return min(4000, max(40, (256 << 20) // size))


def measure(size: int, *, rounds: int, ray: str | None) -> dict:
    count = num_packages(size)
    channels = {kind: Channel(kind, size) for kind in WIRES}
    plain = copy_burst(size)
    bursts: dict[str, Callable[[int], float]] = {"plain copy": plain}
    for kind, channel in channels.items():
        bursts[f"{kind}, in place"] = lambda n, c=channel: c.burst(n, flags=0)
        bursts[f"{kind}, copied out"] = lambda n, c=channel: c.burst(n, flags=COPY)
    seconds = {side: [] for side in bursts}
    trips = {kind: [] for kind in channels}
    for turn in range(rounds + 1):
        for side, burst in bursts.items():
            took = burst(count)
            seconds[side] += [took] if turn else []  # the first round touches every page once
        for kind, channel in channels.items():
            took = [channel.round_trip() for _ in range(20 if size > 1 << 20 else 200)]
            trips[kind] += took if turn else []
    for channel in channels.values():
        channel.close()
    rates = {side: [size * count / s / 1e9 for s in runs] for side, runs in seconds.items()}
    if ray is not None:
        rates["Ray object store"], trips["Ray object store"] = ray_figures(ray, size, count, rounds)
    return report(size, count, rates, trips)


def ray_figures(python: str, size: int, count: int, rounds: int) -> tuple[list[float], list[float]]:
    script = str(Path(__file__).parent / "ray_object_store.py")
    command = [python, script, *map(str, (size, min(count, 1000), rounds, CAPACITY))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures["gigabytes_per_second"], figures["round_trip_seconds"]


def report(size: int, count: int, rates: dict[str, list[float]], trips: dict[str, list[float]]) -> dict:
    figures = {side: spread(runs) for side, runs in rates.items()}
    plain = figures["plain copy"]["median"]
    sides = [side for side in rates if side != "plain copy"]
    ratios = {
        f"{side} / plain copy": {
            "of medians": figures[side]["median"] / plain,
            "of best": max(rates[side]) / max(rates["plain copy"]),  # on a busy machine
        }
        for side in sides
    }
    microseconds = {
        kind: {"median": float(np.median(runs)) * 1e6, "p90": float(np.quantile(runs, 0.9)) * 1e6}
        for kind, runs in trips.items()
    }
    best = max(rates["shared memory, in place"]), max(rates["plain copy"])
    print(f"best of shared memory, in place, and of plain copies: {best[0]:.2f} and {best[1]:.2f} GB/s")
    print(f"{size:,} bytes: " + ", ".join(f"{side} {f['median']:.2f} GB/s" for side, f in figures.items()))
    print(
        "  round trips: " + ", ".join(f"{kind} {f['median']:.0f} us" for kind, f in microseconds.items()),
        flush=True,
    )
    return {
        "bytes": size,
        "packages": count,
        "gigabytes_per_second": figures,
        "ratios": ratios,
        "round_trip_microseconds": microseconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", help="a Python with ray==2.60.0 and NumPy")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--consume", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consume is not None:
        kind, address, token, size = options.consume
        consume(kind, address, token, int(size))
        return
    load = os.getloadavg()[0]
    rows = [measure(size, rounds=options.rounds, ray=options.ray) for size in SIZES]
    busy = {"before": load, "after": os.getloadavg()[0]}
    result = {"capacity": CAPACITY, "load_average": busy, "rows": rows}
    write_result("channels-cpu", result, directory=options.output)


if __name__ == "__main__":
    main()
