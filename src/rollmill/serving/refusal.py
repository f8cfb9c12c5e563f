"""The error of one request, which the client is told and no other request notices."""


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status of the answer.
        retry_after: seconds after which the same request may succeed; None if it never will.
        allow: the methods that the path has, for status 405.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.retry_after, self.allow = status, retry_after, allow
