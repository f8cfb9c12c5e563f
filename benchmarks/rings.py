"""Kills, stops and replaces the ends of rings at random, and counts the fate of each message.

    python benchmarks/rings.py [--transport tcp] --seconds 600

Three producers send numbered messages with a checksum to two consumers, each in a process of its own. Meanwhile
ends are killed, stopped for a while, replaced while they run, and replaced while they are stopped, after which
they wake up and find that they have a successor. What must hold: no message is torn, none is delivered twice, no
sequence number comes twice, at most as many are lost as fit in the rings of ends that were replaced, and an end
that has a successor stops. Writes results/rings-TRANSPORT.json; exits with 1 where something did not hold.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import ring_ends
from measure import HERE, options, some_of, write_result
from ring_ends import DAMAGED, FENCED, SENT, TAKEN, TORN, End

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.transport.handshake import new_token

PRODUCERS, CONSUMERS, CAPACITY = 3, 2, 3
FENCE_SECONDS, SETTLE_SECONDS = 30.0, 20.0
"""How long an end that has a successor may continue once it runs again; and how long all may take to end."""


@dataclass
class Running:
    """A process that holds, or held, an end."""

    kind: str
    end: End
    process: multiprocessing.Process
    stopped_until: float | None = None
    fenced_by: float | None = None
    """When it must have noticed its successor."""


@dataclass
class Scene:
    """All ends of one channel, and what was done to them."""

    transport: str
    nbytes: int
    server: BrokerServer
    token: str
    folder: Path
    rng: random.Random
    holders: dict[tuple[str, int], Running] = field(default_factory=dict)
    replaced: list[Running] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)
    in_flight: Counter = field(default_factory=Counter)
    """By ring: the most that its replaced ends can have taken along."""
    number: int = 0

    def start(self, kind: str, rank: int) -> None:
        """Starts a process that takes this end over."""
        self.number += 1
        peers = CONSUMERS if kind == "produce" else PRODUCERS
        address = self.server.address if self.transport == "memory" else self.server.tcp_address
        pause = self.rng.choice([0.0, 0.002, 0.02])
        place = (self.transport, address, self.token, str(self.folder))
        end = End(*place, self.number, rank, peers, self.nbytes, CAPACITY, pause)
        process = multiprocessing.get_context("forkserver").Process(target=getattr(ring_ends, kind), args=(end,))
        process.start()
        self.holders[kind, rank] = Running(kind, end, process)

    def act(self) -> None:
        """Does one random thing to one or two ends."""
        action = self.rng.choice(["kill", "kill", "kill_both", "stop", "stop", "replace", "replace_stopped"])
        getattr(self, action)(self.rng.choice(sorted(self.holders)))

    def kill(self, place: tuple[str, int]) -> None:
        """Kills an end and replaces it a moment later."""
        holder = self.holders.pop(place)
        self._kill(holder)
        time.sleep(self.rng.uniform(0, 0.2))
        self._succeed(holder)

    def kill_both(self, place: tuple[str, int]) -> None:
        """Kills both ends of a ring before either is replaced, so that its state is lost."""
        kind, peers = ("consume", CONSUMERS) if place[0] == "produce" else ("produce", PRODUCERS)
        other = kind, self.rng.randrange(peers)
        pair = [self.holders.pop(place), self.holders.pop(other)]
        for holder in pair:
            self._kill(holder)
        self.rng.shuffle(pair)
        for holder in pair:
            self._succeed(holder)

    def stop(self, place: tuple[str, int]) -> None:
        """Stops an end for a while."""
        holder = self.holders[place]
        if holder.stopped_until is None:
            self._stop(holder, self.rng.uniform(0.05, 2.0))

    def replace(self, place: tuple[str, int]) -> None:
        """Starts a successor while the predecessor runs."""
        if not ring_ends.is_open(self.holders[place].end):
            return
        holder = self.holders.pop(place)
        holder.fenced_by = time.monotonic() + FENCE_SECONDS
        self.replaced.append(holder)
        self._succeed(holder)

    def replace_stopped(self, place: tuple[str, int]) -> None:
        """Starts a successor while the predecessor is stopped and resumes later."""
        if self.holders[place].stopped_until is None and ring_ends.is_open(self.holders[place].end):
            self._stop(self.holders[place], self.rng.uniform(0.5, 5.0))
        self.replace(place)

    def look_after(self) -> None:
        """Resumes processes that were stopped for long enough, and checks that those with a successor have
        ended.
        """
        self._wake_up()
        now = time.monotonic()
        for holder in list(self.replaced):
            if (code := holder.process.exitcode) is not None:
                self._note_exit(holder, code)
            elif holder.stopped_until is None and now > holder.fenced_by:
                self._give_up(holder)
        for holder in [each for each in self.holders.values() if each.process.exitcode is not None]:
            self._note_failure(holder)
            self._succeed(self.holders.pop((holder.kind, holder.end.rank)))

    def _wake_up(self) -> None:
        now = time.monotonic()
        for holder in [*self.holders.values(), *self.replaced]:
            if holder.stopped_until is not None and now > holder.stopped_until:
                holder.stopped_until = None
                os.kill(holder.process.pid, signal.SIGCONT)
                if holder.fenced_by is not None:
                    holder.fenced_by = now + FENCE_SECONDS

    def finish(self) -> None:
        """Lets all remaining messages be delivered, and ends all processes."""
        for holder in [*self.holders.values(), *self.replaced]:
            if holder.stopped_until is not None:
                holder.stopped_until = 0.0
        deadline = time.monotonic() + FENCE_SECONDS
        while self.replaced and time.monotonic() < deadline:
            self.look_after()
            time.sleep(0.05)
        for holder in list(self.replaced):
            self._give_up(holder)
        Path(self.folder, "over").touch()
        join_all([holder for holder in self.holders.values() if holder.kind == "produce"])
        Path(self.folder, "drained").touch()
        join_all([holder for holder in self.holders.values() if holder.kind == "consume"])
        for holder in self.holders.values():
            if holder.process.exitcode != 0:
                self._note_failure(holder)
                holder.process.kill()

    def _stop(self, holder: Running, seconds: float) -> None:
        if holder.process.exitcode is None:
            os.kill(holder.process.pid, signal.SIGSTOP)
            holder.stopped_until = time.monotonic() + seconds
            self.done["stops"] += 1

    def _kill(self, holder: Running) -> None:
        holder.process.kill()
        holder.process.join()
        self.done["kills"] += 1

    def _succeed(self, holder: Running) -> None:
        """Starts a successor; messages in the rings of the one before may be lost."""
        self.done["replacements"] += 1
        for ring in rings_of(holder):
            self.in_flight[ring] += CAPACITY
        self.start(holder.kind, holder.end.rank)

    def _give_up(self, holder: Running) -> None:
        self.done["not fenced"] += 1
        self._kill(holder)
        self.replaced.remove(holder)

    def _note_exit(self, holder: Running, code: int) -> None:
        if code == FENCED:
            self.done["fenced"] += 1
        else:
            self._note_failure(holder)
        self.replaced.remove(holder)

    def _note_failure(self, holder: Running) -> None:
        self.done["ends that failed"] += 1
        print(f"{holder.kind} {holder.end.rank} ended with {holder.process.exitcode}", flush=True)


def rings_of(holder: Running) -> list[tuple[int, int]]:
    rank = holder.end.rank
    if holder.kind == "produce":
        return [(rank, target) for target in range(CONSUMERS)]
    return [(source, rank) for source in range(PRODUCERS)]


def join_all(holders: list[Running]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    for holder in holders:
        holder.process.join(max(0.0, deadline - time.monotonic()))


def count(folder: Path, in_flight: Counter) -> dict:
    """Returns the figures of the logs."""
    sent: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for file in folder.glob("sent-*"):
        _, process, source, target = file.name.split("-")
        for (number,) in records(file, SENT):
            sent[int(source), int(target)].add((int(process), number))
    conditions, taken, sequences, disorder = Counter(), Counter(), Counter(), 0
    for file in folder.glob("taken-*"):
        target, last = int(file.name.split("-")[2]), {}
        for process, number, source, sequence, condition in records(file, TAKEN):
            conditions[condition] += 1
            if condition != DAMAGED:
                taken[source, target, process, number] += 1
                sequences[source, target, sequence] += 1
                disorder += number <= last.get((source, process), -1)
                last[source, process] = number
    arrived: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for source, target, process, number in taken:
        arrived[source, target].add((process, number))
    lost = {ring: len(sent[ring] - arrived[ring]) for ring in sent}
    return {
        "delivered": sum(taken.values()),
        "torn": conditions[TORN],
        "damaged": conditions[DAMAGED],
        "duplicated": sum(times - 1 for times in taken.values()),
        "sequences repeated": sum(times - 1 for times in sequences.values()),
        "out of order": disorder,
        "lost": sum(lost.values()),
        "in flight": sum(in_flight.values()),
        "rings that lost more than was in flight": sum(lost[ring] > in_flight[ring] for ring in lost),
    }


def records(file: Path, form) -> list[tuple[int, ...]]:
    data = file.read_bytes()
    return list(form.iter_unpack(data[: len(data) // form.size * form.size]))


def endure(transport: str, nbytes: int, seconds: float, rng: random.Random) -> dict:
    broker, token = LocalBroker(), new_token()
    server = BrokerServer(broker, token, host="127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        scene = Scene(transport, nbytes, server, token, Path(name), rng)
        for kind, ranks in (("produce", PRODUCERS), ("consume", CONSUMERS)):
            for rank in range(ranks):
                scene.start(kind, rank)
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                time.sleep(rng.uniform(0.02, 0.8))
                scene.look_after()
                scene.act()
            scene.finish()
        finally:
            for holder in [*scene.holders.values(), *scene.replaced]:
                with contextlib.suppress(OSError):
                    holder.process.kill()
                    holder.process.join()
        done = {name: scene.done[name] for name in ("kills", "stops", "replacements", "fenced", "not fenced")}
        result = {"bytes": nbytes, "seconds": seconds, **done, "ends that failed": scene.done["ends that failed"]}
        result |= count(Path(name), scene.in_flight)
    server.close()
    broker.close()
    return result


MUST_BE_ZERO = ("torn", "duplicated", "sequences repeated", "out of order", "not fenced", "ends that failed")
MUST_BE_ZERO += ("rings that lost more than was in flight",)


def main() -> None:
    chosen = options(
        __doc__,
        transport=some_of(("memory", "tcp")),
        seconds=(600.0, "for each transport, divided among the sizes"),
        bytes=[1_000, 100_000, 4_000_000],
        seed=0,
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    multiprocessing.set_forkserver_preload(["ring_ends"])
    rng, every = random.Random(chosen.seed), []
    for transport in chosen.transport:
        sizes = []
        for nbytes in chosen.bytes:
            sizes.append(endure(transport, nbytes, chosen.seconds / len(chosen.bytes), rng))
            print(json.dumps(sizes[-1]), flush=True)
        wrong = [(size, what) for size in sizes for what in MUST_BE_ZERO if size[what]]
        faults = [f"{size['bytes']} bytes: {what} {size[what]}" for size, what in wrong]
        every += faults
        result = {"transport": transport, "faults": faults, "sizes": sizes}
        write_result(f"rings-{transport}", result, chosen.output)
    sys.exit(1 if every else 0)


if __name__ == "__main__":
    main()
