"""Serves the board on this machine only, to browsers that have the token in the address.

It imports nothing slow: the page opens while the modules that read runs are still being imported.
"""

import contextlib
import hmac
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from rollmill.board.page import board_page
from rollmill.core.errors import UsageError

if TYPE_CHECKING:
    from rollmill.board.responses import Answer, Answers

LOOPBACK = "127.0.0.1"
OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Names of this machine in addresses. A request with another name is rejected, because somebody must have pointed
that name at this machine. Any port is accepted, because a tunnel may use another port at its other end."""
PIECE = 2**18
POLL_SECONDS = 0.1
"""Seconds within which the server reacts to a request to end."""
MAX_FIELDS = 500
IDLE_SECONDS = 60.0
TOKEN_BYTES = 24


class BoardServer(ThreadingHTTPServer):
    """HTTP server for the board of a folder.

    Raises a `UsageError` if the port is in use or not permitted.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.cookie = f"rollmill-{secrets.token_hex(4)}"
        self.page = board_page(folder).encode()
        self._folder = folder
        self._answers: Answers | None = None
        self._lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            hint = "hint: --port 0 chooses a free port."
            raise UsageError(f"--port {port} cannot be used: {error.strerror or error}. {hint}") from error

    @property
    def url(self) -> str:
        """Address that opens the page in a browser, including the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    @property
    def answers(self) -> "Answers":
        """The object that answers requests. Its modules are imported at the first request."""
        with self._lock:
            if self._answers is None:
                from rollmill.board.responses import Answers

                self._answers = Answers(self._folder)
            return self._answers

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Context manager that serves requests in threads, and starts reading the folder immediately."""
        reading = threading.Thread(target=self._read, daemon=True)
        threading.Thread(target=partial(self.serve_forever, POLL_SECONDS), daemon=True).start()
        reading.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            reading.join()  # Python aborts if it exits while a thread imports JAX

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors caused by a client that closed its connection."""

    def _read(self) -> None:
        self.answers.read()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests of the page."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server_version, sys_version = "rollmill", ""
    server: BoardServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        """Sends answers at once."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def do_GET(self) -> None:
        """Answers a request for the page, its data or a file."""
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, errors="replace", max_num_fields=MAX_FIELDS)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the address cannot be read")
            return
        if address.path == "/favicon.ico":
            self._begin(HTTPStatus.NO_CONTENT, "image/x-icon", 0)
            self.end_headers()
        elif not self._is_own_host():
            self._refuse(HTTPStatus.FORBIDDEN, "this server accepts only requests to 127.0.0.1 and localhost")
        elif address.path == "/" and _equal(next(iter(query.get("token", ())), ""), self.server.token):
            self._send_page(with_cookie=True)
        elif not _equal(self._cookie(), self.server.token):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that `rollmill board` printed, with its token")
        elif address.path == "/":
            self._send_page()
        else:
            self._send(self.server.answers.answer(address.path, query))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: addresses have the token."""

    def _is_own_host(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and OWN_HOST.fullmatch(hosts[0]) is not None

    def _cookie(self) -> str:
        pairs = (pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.server.cookie), "")

    def _send_page(self, *, with_cookie: bool = False) -> None:
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", len(self.server.page))
        if with_cookie:
            self.send_header(
                "Set-Cookie", f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(self.server.page)

    def _send(self, answer: "Answer") -> None:
        try:
            self._begin(answer.status, answer.kind, answer.length)
            self.send_header("Content-Security-Policy", answer.policy)
            self.end_headers()
            if isinstance(answer.body, bytes):
                self.wfile.write(answer.body)
            else:
                _copy(answer.body, self.wfile, answer.length)
        finally:
            if not isinstance(answer.body, bytes):
                answer.body.close()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self._begin(status, "text/plain; charset=utf-8", len(body))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")


def _copy(source: IO[bytes], target: BufferedIOBase, length: int) -> None:
    """Copies `length` bytes of a file, which may be growing."""
    while length > 0 and (piece := source.read(min(PIECE, length))):
        target.write(piece)
        length -= len(piece)


def _equal(given: str, expected: str) -> bool:
    """Compares two strings in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
