"""Queues between hosts, with a ring at each end of a connection. Messages are copied from the sender's ring to the
receiver's.

`SenderThread` sends the messages that the local producer publishes. It keeps each slot until the remote consumer
has released it, so the capacity limits both rings together (backpressure). `ReceiverEndpoint` writes arriving
messages to the receiver's rings, and returns the number of released messages as credit.

    sender -> receiver   MESSAGE, header, payload;  or END
    receiver -> sender   number of messages of this sender that were released;  or NOBODY

Invariant: a message is delivered at most once, and no sequence number is delivered twice.

Each end of a ring is held by one process after the other. The broker numbers these *incarnations*
(`Broker.claim`). A message is identified by the incarnation of its sender and its position there. Three rules
hold:

 1. The only copy of a message that can be sent is in its sender's ring, and it is sent to only one incarnation of
    the receiver. After a reconnect to the same incarnation, the sender continues after the messages that arrived
    there. The receiver counts them once the old connection is silent. A message of which only a part arrived was
    not published, and is sent again. With a new incarnation, the sender continues after everything that it ever
    sent, so messages in transit are lost.
 2. A receiver accepts only the latest incarnation of a sender, and counts the arrivals of each incarnation
    separately. A sender never goes back to an earlier incarnation of the receiver. An end that learns of its
    successor closes. A sender learns of it when it dials. A receiver asks the broker when its connection is lost,
    and from time to time while it has none.
 3. Sequence numbers continue from the end that knows the last number because it was not replaced. If both were
    replaced, the broker allocates a range of numbers that was never used.

So each message is delivered at most once if

    the producer dies          its ring dies with it: messages that arrived stay, the others are never sent (1)
    the consumer dies          messages sent to it are not sent again (1)
    both die                   no copy is left, and sequence numbers begin in another range (3)
    the connection breaks      the receiver has counted the arrivals, and only the rest is sent again (1)
    a producer wakes up late   its successor's connection ended its own, and it is refused (2)
    a consumer wakes up late   senders have moved to its successor, and send it none of the old messages (1, 2)

At most the messages that fit in the ring are lost.
"""

import struct
import threading
from typing import NamedTuple

from rollmill.channels.errors import Abandoned
from rollmill.channels.waiting import NAP_MS, Abandon

WORD = struct.Struct("<q")
MESSAGE, END = 1, 2
NOBODY = -(2**63)

POLL_SECONDS = 2.0
"""Interval in seconds at which a channel end asks the broker whether it or the other end was replaced."""

RANGE = 2**40
"""Size of a range of sequence numbers that the broker allocates."""


class RingEnds(NamedTuple):
    """Names under which the broker knows the two ends of a ring between hosts."""

    sender: str
    receiver: str

    @property
    def ranges(self) -> str:
        """Name under which the broker allocates ranges of sequence values, one for each incarnation."""
        return f"{self.receiver}/ranges"


class ResumePoint:
    """The number of messages before this end replaced another, as reported by the remote end."""

    def __init__(self) -> None:
        self.sequence = 0
        """Sequence number of the first message in this end's ring."""
        self._known = threading.Event()

    @property
    def is_known(self) -> bool:
        """Whether the remote end has reported the number of earlier messages."""
        return self._known.is_set()

    @property
    def messages(self) -> int:
        """Number of messages before this end's first message, counted within the current range of numbers."""
        return self.sequence % RANGE

    def learn(self, sequence: int) -> None:
        """Sets the number of earlier messages, reported by the remote end, and wakes threads that wait for it."""
        self.sequence = sequence
        self._known.set()

    def wait(self, abandon: Abandon, what: str) -> int:
        """Blocks until the remote end has reported the number of earlier messages, and returns it.

        Raises `Abandoned` if the run is being stopped.
        """
        while not self._known.wait(NAP_MS / 1000):
            if abandon():
                raise Abandoned(f"{what} was aborted, because the run is being stopped.")
        return self.messages
