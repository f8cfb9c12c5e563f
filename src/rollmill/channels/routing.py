"""Which consumer gets a producer's next message. A route is a function; any other will do as well.

(messages sent so far, occupied slots of each target's ring) -> index of the target
"""

from collections.abc import Sequence

from rollmill.channels.protocols import Route


def round_robin(turn: int, occupied: Sequence[int]) -> int:
    """Strictly in turn: waits for a target that is full, so that where a message goes is never chance."""
    return turn % len(occupied)


def least_filled(turn: int, occupied: Sequence[int]) -> int:
    """Where the fewest messages lie, in turn among equals; waits only when all are full."""
    count = len(occupied)
    return min(range(count), key=lambda index: (occupied[index], (index - turn) % count))


def fixed(index: int) -> Route:
    """Always the target at this place among the sender's targets."""
    return lambda turn, occupied: index
