"""Clients of `rollmill serve` as a load: open connections, each with one request at a time. Standard library only.

    python benchmarks/serving_load.py '{"port": 8000, "connections": 64, "seconds": 5, "body": "{...}"}'

In a closed loop every connection asks again as soon as it is answered. In an open loop requests begin at a fixed
rate, whether the server keeps up or not; the time that one waits for a free connection counts as its latency.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

HOST = "127.0.0.1"


class Shot(NamedTuple):
    """One request as bytes."""

    data: bytes
    kind: str = "good"
    statuses: tuple[int, ...] = (200,)
    """Statuses that its answer may have."""
    ends: bool = False
    """True if the client sends nothing after it: the rest of the request never comes."""
    number: int = 0


class Outcome(NamedTuple):
    """The outcome of a request; status 0 if it was not answered."""

    shot: Shot
    status: int
    body: bytes
    seconds: float


def post(body: bytes | str, path: str = "/act", headers: str = "") -> bytes:
    """Returns a well-formed request."""
    body = body.encode() if isinstance(body, str) else body
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def malformed_shots(good: str) -> list[Shot]:
    """Returns requests of many kinds that must get an error; `good` is a body for observations `[4]`."""
    bad = lambda kind, body: Shot(post(body), kind, (400,))
    raw = lambda kind, data, *statuses, ends=False: Shot(data, kind, statuses or (400,), ends)
    get = lambda path, headers="": f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{headers}\r\n".encode()
    head = f"POST /act HTTP/1.1\r\nHost: {HOST}\r\n"
    return [
        bad("no JSON", "observation=1"),
        bad("empty body", ""),
        bad("truncated JSON", good[:-3]),
        bad("more than JSON", good + good),
        bad("no object", "[1, 2, 3, 4]"),
        bad("null", "null"),
        bad("NaN", '{"observation": [0, NaN, 0, 0]}'),
        bad("infinity", '{"observation": [0, 1e999, 0, 0]}'),
        bad("beyond float32", '{"observation": [0, 1e39, 0, 0]}'),
        bad("text for a number", '{"observation": [0, "1", 0, 0]}'),
        bad("true for a number", '{"observation": [0, true, 0, 0]}'),
        bad("wrong shape", '{"observation": [0, 0, 0]}'),
        bad("nested too deep", '{"observation": ' + "[" * 5_000),
        bad("unequal rows", '{"observations": [[0, 0, 0, 0], [0, 0]]}'),
        bad("no observation", "{}"),
        bad("both forms", '{"observation": [0, 0, 0, 0], "observations": [[0, 0, 0, 0]]}'),
        bad("empty batch", '{"observations": []}'),
        bad("unknown field", good[:-1] + ', "temperature": 1}'),
        bad("no UTF-8", b'{"observation": "\xff\xfe"}'),
        Shot(post('{"observations": [' + ",".join(["[0,0,0,0]"] * 1_000) + "]}"), "batch too large", (413,)),
        raw("body too large", post(b" " * 2**20), 413),
        raw("length too large", f"{head}Content-Length: 99999999\r\n\r\n".encode(), 413),
        raw("length overflows", f"{head}Content-Length: {'9' * 40}\r\n\r\n".encode()),
        raw("negative length", f"{head}Content-Length: -1\r\n\r\n".encode()),
        raw("two lengths", f"{head}Content-Length: 1\r\nContent-Length: 2\r\n\r\n".encode()),
        raw("length and chunks", f"{head}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()),
        raw("bad chunk", f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode()),
        raw("unknown coding", f"{head}Transfer-Encoding: gzip\r\n\r\n".encode()),
        raw("unknown expectation", post(good, headers="Expect: 200-ok\r\n"), 417),
        raw("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
        raw("another version", b"GET / HTTP/9.9\r\n\r\n"),
        raw("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        raw("no carriage returns", b"GET /health HTTP/1.1\nHost: a\n\n"),
        raw("space before colon", get("/health", "Name : value\r\n")),
        raw("NUL in a header", get("/health", "Name: a\0b\r\n")),
        raw("folded header", get("/health", "Name: a\r\n b\r\n")),
        raw("too many headers", get("/health", "".join(f"N{i}: 1\r\n" for i in range(100))), 431),
        raw("header too long", get("/health", f"Name: {'x' * 20_000}\r\n"), 431),
        raw("target too long", get("/" + "x" * 20_000), 431),
        raw("unknown path", get("/action"), 404),
        raw("path beyond", get("/../../etc/passwd"), 404),
        raw("method without a body", get("/act"), 405),
        raw("another method", f"PUT /act HTTP/1.1\r\nContent-Length: {len(good)}\r\n\r\n{good}".encode(), 405),
        raw("unknown method", b"FETCH /act HTTP/1.1\r\n\r\n"),
        raw("tunnel", b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", 404, 405, 501),
        raw("broken off in the head", b"POST /act HT", ends=True),
        raw("broken off in a header", head.encode() + b"Content-Le", ends=True),
        raw("broken off in the body", post(good)[:-5], ends=True),
    ]


class Load:
    """Requests that are left, the connections that send them, and the outcomes.

    Args:
        target: a port of this machine, or the path of a Unix socket.
        shots: the requests.
        open_loop: whether requests wait for their time in `waiting`.
    """

    def __init__(self, target: int | str, shots: Iterator[Shot], *, open_loop: bool) -> None:
        self.target, self.shots, self.open_loop, self.ending = target, shots, open_loop, False
        self.waiting: deque[tuple[Shot, float]] = deque()
        self.idle: list[LoadConnection] = []
        self.outcomes: list[Outcome] = []
        self.tasks: set[asyncio.Task] = set()

    def take(self) -> tuple[Shot, float] | None:
        """Returns the next request and the time at which it began."""
        if self.open_loop:
            return self.waiting.popleft() if self.waiting else None
        shot = next(self.shots, None)
        return None if shot is None else (shot, time.perf_counter())

    def connect(self, connection: "LoadConnection") -> None:
        """Begins to connect, unless the load ends."""
        if self.ending:
            return
        loop, make = asyncio.get_running_loop(), lambda: connection
        if isinstance(self.target, int):
            task = loop.create_task(loop.create_connection(make, HOST, self.target))
        else:
            task = loop.create_task(loop.create_unix_connection(make, self.target))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pace(self, rate: float) -> None:
        """Begins the requests of an open loop, each at its time."""
        began = time.perf_counter()
        for number, shot in enumerate(self.shots):
            due = began + number / rate
            while (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            self.waiting.append((shot, due))
            if self.idle:
                self.idle.pop().send_next()


class LoadConnection(asyncio.Protocol):
    """A connection that sends one request after the other."""

    def __init__(self, load: Load) -> None:
        self.load, self.received = load, b""
        self.transport: Any = None
        self.now: tuple[Shot, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = transport, b""
        self.send_next()

    def send_next(self) -> None:
        """Sends the next request, if there is one; one that was not sent before comes first."""
        self.now = self.now or self.load.take()
        if self.now is None:
            self.load.idle.append(self)
            return
        self.transport.write(self.now[0].data)
        if self.now[0].ends:
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Takes the answers that are complete."""
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            if head.startswith(b"http/1.1 100"):
                self.received = self.received[end + 4 :]
                continue
            at = head.index(b"content-length:") + 15
            stop = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
            if len(self.received) < stop:
                return
            body, self.received = self.received[end + 4 : stop], self.received[stop:]
            self.report(int(head[9:12]), body)
            if b"connection: close" in head:
                self.transport.close()
                return
            self.send_next()

    def report(self, status: int, body: bytes) -> None:
        assert self.now is not None
        shot, began = self.now
        self.load.outcomes.append(Outcome(shot, status, body, time.perf_counter() - began))
        self.now = None

    def end(self) -> None:
        """Gives up a request without an answer."""
        if self.now is not None:
            self.report(0, b"")
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Connects again; a request without an answer is lost."""
        if self.now is not None:
            self.report(0, b"")
        if self in self.load.idle:
            self.load.idle.remove(self)
        self.load.connect(self)


async def drive(
    target: int | str, shots: Iterator[Shot], *, connections: int, rate: float | None = None, limit: float = 600
) -> list[Outcome]:
    """Sends all requests and waits for their answers, at most `limit` seconds; `rate` a second in an open loop."""
    load = Load(target, shots, open_loop=rate is not None)
    clients = [LoadConnection(load) for _ in range(connections)]
    for client in clients:
        load.connect(client)
    began = time.perf_counter()
    if rate is not None:
        await load.pace(rate)
    while len(load.idle) < connections and time.perf_counter() - began < limit:
        await asyncio.sleep(0.005)
    load.ending = True
    for client in clients:
        client.end()
    await asyncio.sleep(0)
    return load.outcomes


def until(seconds: float, data: bytes) -> Iterator[Shot]:
    """Yields the same request for some seconds."""
    end, shot = time.perf_counter() + seconds, Shot(data)
    while time.perf_counter() < end:
        yield shot


def mixed(bodies: Sequence[str], count: int, *, share: float, seed: int = 0) -> list[Shot]:
    """Returns `count` requests in random order, a share of them malformed, each kind about equally often.

    Good requests have the bodies in turns; `Shot.number` is the index of the body.
    """
    bad, number = malformed_shots(bodies[0]), round(count * share)
    good = [Shot(post(body), number=index) for index, body in enumerate(bodies)]
    shots = [bad[index % len(bad)] for index in range(number)]
    shots += [good[index % len(good)] for index in range(count - number)]
    random.Random(seed).shuffle(shots)
    return shots


def summary(seconds_each: Sequence[float], *, seconds: float, rows: int = 1) -> dict[str, Any]:
    """Returns decisions a second, and latencies in milliseconds, of answered requests with `rows` decisions
    each.
    """
    times = sorted(seconds_each)
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))] * 1e3 if times else None
    latencies = {"median_ms": at(0.5), "p99_ms": at(0.99), "largest_ms": at(1)}
    return {"decisions_per_second": len(times) * rows / seconds, **latencies}


def main() -> None:
    """Prints latencies in microseconds, the seconds of the whole load, and the statuses of all answers."""
    order = json.loads(sys.argv[1])
    target, data = order.get("port") or order["path"], post(order["body"])
    asyncio.run(drive(target, until(order.get("warm_up", 1.0), data), connections=order["connections"]))
    began, shots = time.perf_counter(), until(order["seconds"], data)
    outcomes = asyncio.run(drive(target, shots, connections=order["connections"], rate=order.get("rate")))
    seconds = time.perf_counter() - began
    times = [round(outcome.seconds * 1e6) for outcome in outcomes if outcome.status == 200]
    answers = Counter(str(outcome.status) for outcome in outcomes)
    print(json.dumps({"microseconds": times, "seconds": seconds, "answers": answers}))


if __name__ == "__main__":
    main()
