"""Routes: functions that choose the consumer of a producer's next message; see `protocols.Route`."""

from collections.abc import Sequence


def round_robin(turn: int, occupied: Sequence[int]) -> int:
    """Cycles through the targets. Waits while the next one is full, so that the assignment is deterministic."""
    return turn % len(occupied)
