"""A ring at each end of a connection: the sender's is emptied into the receiver's.

`Pump` sends what the local producer publishes, and keeps each slot until the far consumer has released it: so
the capacity holds end to end. `Inlet` puts what arrives in the receiver's rings, and says how much was released
(the sender's credit).

    pump -> endpoint   MESSAGE, header, payload;  or END
    endpoint -> pump   how many messages of this sender were released, as one number;  or NOBODY

Invariant: a message is delivered once or not at all, and no sequence number is delivered twice.

Each end of a ring is held by one *incarnation* after the other, which the broker numbers (`Broker.claim`). A
message is known by the incarnation of its sender and its position there. Three rules hold:

 1. The only copy that can be sent lies in its sender's ring, and is sent to one incarnation of the receiver only.
    Where a connection to the same incarnation broke, the sender goes on behind what arrived there, which the
    receiver says once the old connection is silent; a message that did not arrive whole was not published, and is
    sent again. With another incarnation the sender goes on behind all that it ever sent: messages on their way are
    lost.
 2. A receiver listens to the latest incarnation of a sender that it or the broker knows, and counts arrivals of
    each sender apart; a sender never goes back to an earlier incarnation of the receiver. An end that learns of
    its successor closes: a sender hears of it when it dials; a receiver asks the broker when its connection is
    lost, and from time to time where it has none.
 3. Sequence numbers go on from whichever end knows how far they were, which is one that was not replaced since.
    Where both were, the broker hands out a range that was never used.

So at most once holds where

    the producer dies          its ring dies with it: what arrived stays, the rest is sent by nobody (1)
    the consumer dies          what was sent to it is not sent again (1)
    both die                   no copy is left, and numbers begin in another range (3)
    the connection breaks      the endpoint has counted what arrived, and only the rest is sent again (1)
    a producer wakes up late   its connection was ended by its successor's, and it is turned away (2)
    a consumer wakes up late   pumps have left it for its successor, with none of the messages that it has (1, 2)

At most as many messages are lost as fit in the ring.
"""

import struct
import threading
from typing import NamedTuple

from rollmill.channels.errors import Abandoned
from rollmill.channels.waiting import NAP_MS, Abandon

WORD = struct.Struct("<q")
MESSAGE, END = 1, 2
NOBODY = -(2**63)

LOOK_SECONDS = 2.0
"""How often an end asks the broker whether the other one, or itself, was replaced."""

RANGE = 2**40
"""Sequence numbers of one range; see rule 3."""


class RingEnds(NamedTuple):
    """Names of a ring's ends, as the broker knows them."""

    sender: str
    receiver: str

    @property
    def ranges(self) -> str:
        """The name under which a range of sequence numbers is claimed."""
        return f"{self.receiver}/ranges"


class ResumePoint:
    """How many messages passed before this end took the place of another; the far end says so when reached."""

    def __init__(self) -> None:
        self.sequence = 0
        """Sequence number of the first message of this end's ring."""
        self._known = threading.Event()

    @property
    def is_known(self) -> bool:
        """Whether the number was learned."""
        return self._known.is_set()

    @property
    def messages(self) -> int:
        """Messages before this end's, as far as somebody remembers them."""
        return self.sequence % RANGE

    def learn(self, sequence: int) -> None:
        """Takes the number."""
        self.sequence = sequence
        self._known.set()

    def wait(self, abandon: Abandon, what: str) -> int:
        """The number of messages, as soon as it is known.

        Raises:
            Abandoned: the run is being stopped.
        """
        while not self._known.wait(NAP_MS / 1000):
            if abandon():
                raise Abandoned(f"{what} was given up, because the run is being stopped.")
        return self.messages
