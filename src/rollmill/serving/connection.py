"""An HTTP/1.1 connection: reads requests, which may be pipelined, and sends their answers in the same order."""

import asyncio
import contextlib
import traceback
from collections import deque

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.serving.context import ConnectionContext, Exchange, Request
from rollmill.serving.responses import CONTINUE, Refusal, Response, encode, error_response, long_body, long_head

try:
    import httptools
except ImportError as error:
    raise UsageError(
        f"a server needs a package that is not installed ({error}): {install_command('serve')}"
    ) from None

LINGER_SECONDS = 2.0
"""How long a connection is read after it was closed with an error. If it were closed with unread data, the client
might not receive the answer."""


PIECE = 1024
"""Number of bytes parsed in one turn of a connection, in addition to the rest of a body. This corresponds to some
dozens of short requests."""

MAX_WAITING = 2**14
"""Number of unparsed bytes above which a connection is not read any further."""

MAX_DIGITS = 20
"""Maximum number of digits in the length of a body, which fits into 64 bits."""

MAX_FRAMING = 8
"""Maximum size of a chunked body on the wire, with the lengths of chunks, relative to the limit for bodies."""


class HttpConnection(asyncio.Protocol):
    """Serves one client within all limits. If there is a `refusal`, it is sent at once, and no request is read."""

    def __init__(self, context: ConnectionContext, refusal: Refusal | None = None) -> None:
        self._context, self._limits = context, context.limits
        self._refusal = refusal
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._unanswered: deque[Exchange] = deque()
        self._unstarted: deque[Exchange] = deque()
        self._starting = False
        self._receiving: Exchange | None = None
        self._began = self._loop.time()
        self._blocked: float | None = None
        self._ended = self._paused = self._in_queue = self._at_end = False
        self._data = bytearray()
        self._piece = self._body_left = 0
        self._head_bytes = self._headers = self._unparsed = self._received = 0
        self._in_head = self._owes_continue = False
        self._url = self._authorization = self._expect = self._length = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport

    # --- asyncio's callbacks --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts reading from a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._context.opening.discard(self)
        self._context.connections.add(self)
        if self._refusal is not None:
            self._end_with(self._refusal)
        else:
            self._context.strangers.add(self, transport.get_extra_info("peername"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes a closed connection. Answers that are still being computed are discarded."""
        self._ended = True
        self._context.connections.discard(self)
        self._context.strangers.discard(self)
        self._drop_unanswered()
        if self._receiving is not None:
            self._release(self._receiving)
            self._receiving = None

    def data_received(self, data: bytes) -> None:
        """Stores received data until it is this connection's turn, and pauses reading until then."""
        if self._ended:
            return
        self._data += data
        self._ask_for_turn()
        if len(self._data) > MAX_WAITING:
            self._pause()

    def take_turn(self) -> bool:
        """Parses part of the received data, and starts the requests that are complete. See `fair_turns.Turn`."""
        size = max(PIECE, min(self._body_left, len(self._data)))
        piece = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        if not self._ended:
            self._take(piece)
        if self._ended:
            self._data.clear()
        self._in_queue = bool(self._data) and self._blocked is None and not self._unstarted
        self._pause()
        if self._at_end and not self._data:
            self._end_of_input()
        return self._in_queue

    def _take(self, piece: bytes) -> None:
        self._piece = len(piece)
        if self._receiving is not None:
            self._received += len(piece)
            self._unparsed += len(piece)
        if (refusal := self._parse(piece)) is not None:
            self._end_with(refusal)
        self._start()

    def _ask_for_turn(self) -> None:
        """Joins the queue, unless the client has to take answers first."""
        if self._data and not self._in_queue and self._blocked is None and not self._unstarted:
            self._in_queue = True
            self._context.turns.ask(self.take_turn)

    def eof_received(self) -> bool:
        """Answers a request that the client did not complete, and keeps the connection open until its answers are
        sent.
        """
        if self._data and not self._ended:
            self._at_end = True
            return True
        return self._end_of_input()

    def _end_of_input(self) -> bool:
        """Answers a request that the client broke off, and returns whether answers have to be waited for."""
        if self._at_end:
            self._at_end = False
            if not self._end_of_input() and not self._transport.is_closing():
                self._transport.close()
            return True
        if not self._ended and self._receiving is not None:
            self._end_with(Refusal(400, "the request is truncated: the connection ended before it was complete."))
        if self._unanswered:
            self._unanswered[-1].keep_alive = False
            self._ended = True
            return True
        return False

    def pause_writing(self) -> None:
        """Stops reading from a client that does not read its answers."""
        self._blocked = self._loop.time()
        self._pause()

    def resume_writing(self) -> None:
        """Reads again from a client that has read its answers."""
        self._blocked = None
        self._ask_for_turn()
        self._pause()

    # --- the parser's callbacks -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Starts a new request when the parser finds its first byte."""
        self._receiving, self._in_head = Exchange(), True
        self._head_bytes = self._headers = self._received = self._body_left = 0
        self._unparsed = self._piece  # all of it may belong to this request
        self._url = self._authorization = self._expect = self._length = b""
        self._body, self._owes_continue = [], False
        self._began = self._loop.time()

    def on_url(self, url: bytes) -> None:
        """Appends a parsed part of the URL to the target of the request."""
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a parsed header if the server uses it."""
        self._headers += 1
        self._count_head(len(name) + len(value))
        match name.lower():
            case b"authorization":
                self._authorization = value
            case b"expect":
                self._expect = value.lower()
            case b"content-length":
                self._length = value

    def on_headers_complete(self) -> None:
        """Checks a request whose headers are complete, and rejects it before its body is read if necessary."""
        self._in_head = False
        exchange = self._receiving
        assert exchange is not None
        method = self._parser.get_method().decode("ascii", "replace")
        path = self._url.partition(b"?")[0].decode("ascii", "replace")
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.old, exchange.without_body = self._parser.get_http_version() == "1.0", method == "HEAD"
        exchange.request = Request(method, path, b"")
        try:
            self._context.application.admit(method, path, self._authorization)
            self._context.strangers.discard(self)
            self._check_length()
            if self._expect and self._expect != b"100-continue":
                raise Refusal(417, f"Expect: {self._expect[:60].decode('ascii', 'replace')} is not supported.")
        except Refusal as refusal:
            if len(self._length) > MAX_DIGITS or self._announced_length() > self._limits.body_bytes:
                raise  # the body is not read, so no other request can follow
            exchange.request = refusal
        else:
            self._owes_continue = bool(self._expect)
            self._continue()

    def on_body(self, body: bytes) -> None:
        """Stores a part of the body within the limits. Bodies of rejected requests are discarded."""
        exchange, context = self._receiving, self._context
        assert exchange is not None
        self._owes_continue = False
        exchange.body_bytes += len(body)
        self._body_left = max(0, self._body_left - len(body))
        if exchange.body_bytes > self._limits.body_bytes:
            raise long_body(self._limits, exchange.body_bytes)
        if not isinstance(exchange.request, Request):
            return
        exchange.held += len(body)
        context.held_bytes += len(body)
        if context.held_bytes > self._limits.held_bytes:
            raise Refusal(
                503,
                f"the bodies of unanswered requests exceed the limit of {self._limits.held_bytes:,} bytes.",
                retry_after=1,
            )
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Passes a complete request to the application."""
        exchange = self._receiving
        assert exchange is not None
        self._receiving = None
        if isinstance(exchange.request, Request):
            exchange.request = exchange.request._replace(body=b"".join(self._body))
        self._body = []
        self._unanswered.append(exchange)
        self._unstarted.append(exchange)

    def _parse(self, data: bytes) -> Refusal | None:
        """Feeds the parser, and returns an error after which it cannot continue."""
        try:
            self._parser.feed_data(data)
            self._check_unparsed()
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Refusal):
                raise
            return error.__context__
        # the client offers another protocol, which a server may ignore, and nothing can follow
        except httptools.HttpParserUpgrade:
            if self._receiving is not None or not self._unanswered:
                return Refusal(501, "protocol changes (Upgrade) are not supported. Use HTTP/1.1.")
            self._unanswered[-1].keep_alive, self._ended = False, True
        except httptools.HttpParserError as error:
            return Refusal(400, f"the request is not valid HTTP/1.1: {str(error)[:200]}.")
        except Refusal as refusal:
            return refusal
        return None

    # --- answers --------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Closes the connection if its client is too slow, or has been silent for too long."""
        limits = self._limits
        if self._blocked is not None and now - self._blocked > limits.send_seconds:
            self._transport.abort()
        elif self._ended:
            return
        elif self._receiving is not None:
            if now - self._began > limits.receive_seconds:
                self._end_with(
                    Refusal(
                        408, f"the request was not complete after {limits.receive_seconds:g} s.", retry_after=1
                    )
                )
        elif not self._unanswered and now - self._began > limits.idle_seconds:
            self._transport.close()

    def give_up(self) -> None:
        """Closes the connection at once to make room for another."""
        self._ended = True
        self._transport.abort()

    def close(self) -> None:
        """Closes the connection when the server stops, after pending answers have been sent."""
        if not self._ended and self._receiving is not None:
            self._end_with(Refusal(503, "the server is stopping.", retry_after=1))
        elif not self._unanswered:
            self._transport.close()

    def _start(self) -> None:
        """Starts requests up to the limit of concurrent ones."""
        if self._starting:  # an answer inside the loop below calls this again, and the loop continues by itself
            return
        self._starting = True
        try:
            self._start_all()
        finally:
            self._starting = False
        self._ask_for_turn()
        self._pause()

    def _start_all(self) -> None:
        while self._unstarted and len(self._unanswered) - len(self._unstarted) < self._limits.pipelined:
            exchange = self._unstarted.popleft()
            self._context.statistics.add("requests")
            if isinstance(exchange.request, Refusal):
                self._respond(exchange, error_response(exchange.request))
                continue
            assert exchange.request is not None
            try:
                self._context.application.answer(
                    exchange.request, lambda response, exchange=exchange: self._answer(exchange, response)
                )
            except Refusal as refusal:
                self._respond(exchange, error_response(refusal))
            except Exception:  # an error of the server must not affect other requests
                traceback.print_exc()
                self._respond(exchange, error_response(Refusal(500, "an internal error occurred in the server.")))

    def _answer(self, exchange: Exchange, response: Response) -> None:
        self._respond(exchange, response)
        if self._unstarted:
            self._start()

    def _respond(self, exchange: Exchange, response: Response) -> None:
        """Keeps an answer until those before it are sent, then sends all that are ready."""
        exchange.answer = response
        self._context.statistics.count_response(response.status)
        self._release(exchange)
        ready = []
        while self._unanswered and (answer := self._unanswered[0].answer) is not None:
            first = self._unanswered.popleft()
            keep = first.keep_alive and not (self._context.stopping and not self._unanswered)
            ready.append(encode(answer, keep_alive=keep, old=first.old, without_body=first.without_body))
            if not keep:
                self._drop_unanswered()
                self._send(ready)
                self._linger()
                return
        self._send(ready)
        self._continue()
        self._began = self._loop.time() if self._receiving is None else self._began

    def _continue(self) -> None:
        """Sends `100 Continue` to a client that waits for it, after the answers to its earlier requests."""
        if self._owes_continue and not self._unanswered:
            self._owes_continue = False
            self._send([CONTINUE])

    def _send(self, parts: list[bytes]) -> None:
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def _end_with(self, refusal: Refusal) -> None:
        """Answers with an error after which the connection cannot be used any more."""
        exchange = self._receiving or Exchange()
        exchange.keep_alive, exchange.request = False, refusal
        self._receiving, self._in_head, self._ended = None, False, True
        self._context.statistics.add("requests")
        self._unanswered.append(exchange)
        self._respond(exchange, error_response(refusal))

    def _linger(self) -> None:
        """Ends the connection. What the client still sends is read and dropped."""
        self._ended = True
        if self._transport.is_closing():
            return
        with contextlib.suppress(OSError, NotImplementedError):
            if self._transport.can_write_eof():
                self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.close)

    def _pause(self) -> None:
        """Reads from the client only while it takes its answers, and has not sent too many requests."""
        waits = self._blocked is not None or bool(self._unstarted or self._data)
        pause = waits and not self._ended
        if pause != self._paused and not self._transport.is_closing():
            self._paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def _release(self, exchange: Exchange) -> None:
        self._context.held_bytes -= exchange.held
        exchange.held = 0

    def _drop_unanswered(self) -> None:
        for exchange in self._unanswered:
            self._release(exchange)
        self._unanswered.clear()
        self._unstarted.clear()

    def _check_length(self) -> None:
        """Rejects a body whose declared length, which may have any number of digits, is too large."""
        if len(self._length) > MAX_DIGITS:
            digits = f"Content-Length has {len(self._length):,} digits, more than the limit of {MAX_DIGITS}."
            raise Refusal(400, digits)
        self._body_left = self._announced_length()
        if self._body_left > self._limits.body_bytes:
            raise long_body(self._limits, self._body_left)

    def _announced_length(self) -> int:
        """Returns the length of the body by the head, or 0 if there is none."""
        return int(self._length) if self._length.isdigit() else 0

    def _count_head(self, length: int) -> None:
        limits = self._limits
        self._unparsed = 0
        self._head_bytes += length
        if self._headers > limits.headers:
            raise Refusal(431, f"the request exceeds the limit of {limits.headers} headers.")
        if self._head_bytes > limits.head_bytes:
            raise long_head(limits)

    def _check_unparsed(self) -> None:
        """Limits the data in the parser: a header that has not ended yet, and the framing of a body."""
        limits = self._limits
        if self._in_head and self._head_bytes + self._unparsed > limits.head_bytes:
            raise long_head(limits)
        if self._received > MAX_FRAMING * (limits.head_bytes + limits.body_bytes):
            raise long_body(self._limits, self._received)
