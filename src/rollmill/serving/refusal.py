"""The error of one request, which the client is told and no other request notices."""

from rollmill.serving.limits import ServerLimits


class Refusal(Exception):
    """A request that is answered with an error: its HTTP `status`, and headers.

    `retry_after` has the seconds after which the same request may succeed, or None if it never will. `allow` has
    the methods of the path, for status 405.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.retry_after, self.allow = status, retry_after, allow


def long_head(limits: ServerLimits) -> Refusal:
    """The refusal of a request whose first line and headers have too many bytes."""
    return Refusal(431, f"the request's first line and headers have more than {limits.head_bytes:,} bytes.")


def long_body(limits: ServerLimits, length: int) -> Refusal:
    """The refusal of a body of at least `length` bytes, which are too many."""
    return Refusal(413, f"the body has {length:,} bytes or more, and at most {limits.body_bytes:,} are read.")
