"""How edges between groups of fragments are carried: experience, weights, and reductions.

A `Wire` opens the ends of channels by name; it may run through threads, shared memory or TCP, and whoever
uses a channel does not see which. What moves are pytrees of arrays whose `Layout` both ends know
beforehand, as raw bytes. Nothing that comes from a channel is unpickled or evaluated.
"""

from rollmill.channels.base import (
    Abandon,
    Address,
    Broker,
    Gathered,
    Header,
    Message,
    NewestReader,
    NewestWriter,
    Receiver,
    Reduction,
    Reservation,
    Route,
    Sender,
    Statistics,
    Versioned,
    Wire,
)
from rollmill.channels.doorbell import Doorbell
from rollmill.channels.errors import Abandoned, ChannelClosed, Damaged, Refused, TimedOut
from rollmill.channels.layout import Layout

__all__ = [
    "Abandon",
    "Abandoned",
    "Address",
    "Broker",
    "ChannelClosed",
    "Damaged",
    "Doorbell",
    "Gathered",
    "Header",
    "Layout",
    "Message",
    "NewestReader",
    "NewestWriter",
    "Receiver",
    "Reduction",
    "Refused",
    "Reservation",
    "Route",
    "Sender",
    "Statistics",
    "TimedOut",
    "Versioned",
    "Wire",
]
