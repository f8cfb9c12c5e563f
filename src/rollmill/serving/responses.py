"""Encodes answers as HTTP/1.1. A refusal is the error response to one request, and affects no other request."""

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from rollmill.serving.limits import ServerLimits


class Refusal(Exception):
    """An error response to a request, with its HTTP `status` and headers.

    `retry_after` is the number of seconds after which the same request may succeed, or None if it never will.
    `allow` lists the methods of the path, for status 405.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.retry_after, self.allow = status, retry_after, allow


def long_head(limits: ServerLimits) -> Refusal:
    """Returns the refusal for a request whose first line and headers are too long."""
    return Refusal(431, f"the request line and the headers exceed the limit of {limits.head_bytes:,} bytes.")


def long_body(limits: ServerLimits, length: int) -> Refusal:
    """Returns the refusal for a body of at least `length` bytes, which is too large."""
    return Refusal(
        413, f"the body has at least {length:,} bytes, which exceeds the limit of {limits.body_bytes:,}."
    )


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Response(NamedTuple):
    """An answer to a request: a JSON document and an HTTP status."""

    body: bytes
    status: int = 200
    headers: bytes = b""
    """Further HTTP headers, each with its line break."""


def json_response(document: Any) -> Response:
    """Returns a response with status 200 and `document` as its JSON body."""
    return Response(msgspec.json.encode(document))


def error_response(refusal: Refusal) -> Response:
    """Returns the answer to a rejected request: `{"error": message}`."""
    headers = b""
    if refusal.retry_after is not None:
        headers += b"Retry-After: %d\r\n" % refusal.retry_after
    if refusal.allow:
        headers += b"Allow: %s\r\n" % refusal.allow.encode()
    if refusal.status == 401:
        headers += b"WWW-Authenticate: Bearer\r\n"
    return Response(msgspec.json.encode({"error": str(refusal)}), refusal.status, headers)


def encode(response: Response, *, keep_alive: bool, old: bool, without_body: bool) -> bytes:
    """Encodes an answer as bytes of HTTP/1.1.

    `old` marks an HTTP/1.0 client, which needs a header to keep the connection open. `without_body` is for `HEAD`
    requests.
    """
    connection = b"" if keep_alive and not old else b"keep-alive" if keep_alive else b"close"
    line = b"Connection: %s\r\n" % connection if connection else b""
    head = b"%s%s%s%sContent-Length: %d\r\n\r\n" % (
        _status_line(response.status),
        _date(int(time.time())),
        line,
        response.headers,
        len(response.body),
    )
    return head if without_body else head + response.body


@lru_cache(maxsize=64)
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n".encode()


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
