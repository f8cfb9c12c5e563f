"""Requests of strangers, all generated: methods, paths, headers, lengths, tokens, documents and endings.

Each is sent to a server with a token. Answers are those of HTTP and never an error of the server's own, and after
each the owner is answered in time.
"""

import contextlib
import io
import json
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
from hostile_files import CONTENTS, edits  # noqa: E402

TOKEN = "t" * 40
OWN = f"Authorization: Bearer {TOKEN}\r\n".encode()
DOCUMENT = {"observation": [0.1, 0.2, 0.3, 0.4]}
BATCH = {"observations": [[0.1, 0.2, 0.3, 0.4]]}
LIMIT = 2.0
"""Seconds in which the owner is answered."""
MAX_READ = 2**20

METHODS = (
    *(b"GET POST PUT DELETE HEAD OPTIONS TRACE CONNECT PATCH get".split()),
    b"G\0T",
    b"\x1b[31m",
    b"A" * 9000,
)
PATHS = (
    *(
        b"/act",
        b"/health",
        b"/",
        b"*",
        b"//act",
        b"/act/../act",
        b"/../../etc/passwd",
        b"/%2e%2e/%2e%2e/etc/passwd",
    ),
    *(
        b"/act?x=%00",
        b"http://evil/act",
        b"/\0",
        b"/\xff\xfe",
        b"/\x1b]0;evil\x07",
        b"/" + b"a" * 9000,
        b"",
        b"/a b",
    ),
)
VERSIONS = (
    b"HTTP/0.9",
    b"HTTP/1.0",
    b"HTTP/2",
    b"HTTP/9.9",
    b"HTTP/1.1x",
    b"",
    b"FTP/1.1",
    b"HTTP/" + b"1" * 9000,
)
LENGTHS = (
    b"-1",
    b"+5",
    b"0x5",
    b"5, 5",
    b"5 5",
    b"1e3",
    b"",
    b"NaN",
    b"\xc2\xb2",
    b"9" * 19,
    b"9" * 5000,
    b"1",
    b"99",
)
HEADERS = (
    *(b"Content-Length: %s" % length for length in LENGTHS),
    *(
        b"Transfer-Encoding: %s" % coding
        for coding in (b"chunked", b"gzip", b"chunked, chunked", b"identity", b"x\0")
    ),
    *(b"Content-Length: 3\r\nContent-Length: 4", b"Content-Length: 3\r\nTransfer-Encoding: chunked"),
    *(b"Host: ", b"Host: a\r\nHost: b", b"Host: evil@x:99999999", b"Expect: 100-continue", b"Expect: 999-x"),
    *(b"Upgrade: websocket\r\nConnection: Upgrade", b"Upgrade: h2c", b"Connection: close, keep-alive"),
    *(b"Content-Encoding: gzip", b"Content-Type: multipart/form-data; boundary=x", b"Range: bytes=0-99999999999"),
    *(b"X: " + b"a" * 70_000, b"a" * 70_000 + b": x", b"\r\n".join(b"X%d: y" % i for i in range(5000))),
    *(b"no colon", b": no name", b" folded: x", b"X : y", b"X: a\r\n b", b"X: \0", b"X: \x1b[31m", b"\xff: \xff"),
)
TOKENS = (
    *(
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer  x",
        b"Basic dDp0",
        b"Bearer " + TOKEN[:-1].encode(),
        b"Bearer \xff\xfe",
    ),
    *(b"bearer " + TOKEN.encode() + b"x", b"Bearer " + b"t" * 60_000, b"Bearer " + TOKEN.encode() + b"\0", b"\0"),
)
CHUNKS = (
    *(
        b"-1\r\n\r\n",
        b"zz\r\nx\r\n0\r\n\r\n",
        b"f" * 16 + b"\r\nx",
        b"f" * 5000,
        b"1\r\nxx\r\n0\r\n\r\n",
        b"0" * 9000,
    ),
    *(b"1;" + b"a" * 9000 + b"\r\nx\r\n0\r\n\r\n", b"1\nx\n0\n\n", b"0\r\nX: y\r\n" * 99, b"1\r\nx\r\n" * 9000),
)
STREAMS = {
    "zeros": b"\0" * 9000,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 99,
    "new lines": b"\r\n" * 40_000,
    "line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "no unicode": b"\xff\xfe" * 4000,
    "a pickle": b"cevil_tool\npolicy\n(tR.",
    "pipelined": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3000,
    "pipelined garbage": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n\0" * 300,
}
ENDINGS = ("half closed", "closed", "reset", "left open", "byte by byte")


CLIENTS = {"owner": OWN, "stranger": b""}


class Request(NamedTuple):
    """Bytes of a stranger, and how the connection ends."""

    kind: str
    name: str
    data: bytes
    ending: str = "half closed"


def requests() -> Iterator[Request]:
    """All requests."""
    yield from _lines()
    yield from _headers()
    yield from _documents()
    yield from _endings()


def _lines() -> Iterator[Request]:
    for method, path in product(METHODS, PATHS):
        yield Request(
            "lines", f"{method[:9]!r} {path[:30]!r}", b"%s %s HTTP/1.1\r\nHost: x\r\n\r\n" % (method, path)
        )
    for version, method in product(VERSIONS, METHODS[:2]):
        yield Request("lines", f"{method!r} {version[:9]!r}", b"%s /act %s\r\nHost: x\r\n\r\n" % (method, version))


def _headers() -> Iterator[Request]:
    for (who, own), header, path in product(CLIENTS.items(), HEADERS, (b"/act", b"/health")):
        head = b"POST %s HTTP/1.1\r\nHost: x\r\n%s%s\r\n\r\n" % (path, own, header)
        yield Request("headers", f"{header[:30]!r} to {path!r} of the {who}", head + b"{}\r\n\r\n")
    for token, path in product(TOKENS, PATHS[:4]):
        yield Request(
            "tokens", f"{token[:20]!r} for {path!r}", posted(path, b"{}", b"Authorization: %s\r\n" % token)
        )


def _documents() -> Iterator[Request]:
    for (who, own), chunk in product(CLIENTS.items(), CHUNKS):
        head = b"POST /act HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % own
        yield Request("chunks", f"{chunk[:20]!r} of the {who}", head + chunk)
    for name, content in CONTENTS.items():
        yield Request("documents", name, posted(b"/act", content or b" " * 2**20, OWN))
    for which, document in (("one", DOCUMENT), ("batch", BATCH)):
        for name, content in edits(document):
            yield Request("documents", f"{which}: {name}", posted(b"/act", content, OWN))


def _endings() -> Iterator[Request]:
    for (name, stream), ending in product(STREAMS.items(), ENDINGS):
        yield Request("streams", f"{name}, {ending}", stream[: 200 if ending == "byte by byte" else None], ending)
    whole = posted(b"/act", json.dumps(DOCUMENT).encode(), OWN)
    for end, ending in product(range(0, len(whole), 7), ENDINGS[:4]):
        yield Request("cut", f"after {end} bytes, {ending}", whole[:end], ending)


def posted(path: bytes, body: bytes, headers: bytes) -> bytes:
    """A request with a body."""
    return b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (path, headers, len(body), body)


class Answered(NamedTuple):
    """The end of a request."""

    statuses: tuple[int, ...]
    faults: tuple[str, ...]


class Strangers:
    """Sends requests of strangers to a server, and then one of its owner's.

    Args:
        server: what `serving` yields, with `TOKEN`.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._open: list[socket.socket] = []

    def tried(self, request: Request) -> Answered:
        """The server's answers to a request, and their faults and those of the answer to the owner after it."""
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            answers = self._sent(request)
            began = time.monotonic()
            status, document = self._server.ask("/act", DOCUMENT, headers={"Authorization": f"Bearer {TOKEN}"})
        late = time.monotonic() - began
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]
        found = [f"was answered {code}" for code in statuses if not 100 <= code < 600 or code == 500]
        if answers and not statuses:
            found.append(f"was answered {answers[:80]!r}")
        if request.kind == "tokens" and 200 in statuses and "/health" not in request.name:
            found.append("was let in without the token")
        if status != 200 or document["action"] not in (0, 1):
            found.append(f"the owner was answered {status}")
        if late > LIMIT:
            found.append(f"the owner was answered after {late:.1f} s")
        if "Traceback" in printed.getvalue() or b"Traceback" in answers or b"\x1b" in answers:
            found.append(f"printed {printed.getvalue()[:300]!r}")
        return Answered(tuple(statuses), tuple(found))

    def close(self) -> None:
        """Closes the connections that were left open."""
        for connection in self._open:
            connection.close()

    def _sent(self, request: Request) -> bytes:
        """All that is answered."""
        connection = self._server.connect()
        connection.settimeout(2.0)
        if request.ending == "left open":
            self._open.append(connection)
        parts = [request.data[i : i + 1] for i in range(len(request.data))]
        with contextlib.suppress(OSError):
            for part in parts if request.ending == "byte by byte" else [request.data]:
                connection.sendall(part)
        if request.ending == "left open":
            return b""
        with connection, contextlib.suppress(OSError):
            if request.ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if request.ending in ("half closed", "byte by byte"):
                connection.shutdown(socket.SHUT_WR)
                return _read(connection)
        return b""


def _read(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < MAX_READ and (part := connection.recv(2**16)):
            received += part
    return received
