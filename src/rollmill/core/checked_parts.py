"""Whether the parts of a graph are checked when it is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECKED = ContextVar("parts of graphs are checked", default=True)


def are_checked() -> bool:
    """Returns whether functions of environments and networks are traced for their checks."""
    return _CHECKED.get()


@contextmanager
def without_checks() -> Iterator[None]:
    """Builds graphs without checks, to compare them with graphs that were checked."""
    token = _CHECKED.set(False)
    try:
        yield
    finally:
        _CHECKED.reset(token)
