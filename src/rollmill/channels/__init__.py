"""How edges between groups of fragments are carried: experience, weights, and reductions.

A `Wire` opens the ends of channels by name; it may run through threads, shared memory or TCP, and whoever
uses a channel does not see which. What moves are pytrees of arrays whose `Layout` both ends know
beforehand, as raw bytes. Nothing that comes from a channel is unpickled or evaluated.
"""

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.scope import ScopedBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.errors import Abandoned, ChannelClosed, Damaged, Refused, TimedOut
from rollmill.channels.layout import Layout
from rollmill.channels.protocols import (
    Address,
    Broker,
    ChannelStatistics,
    Gathered,
    Header,
    LatestReader,
    LatestWriter,
    ReceivedMessage,
    Receiver,
    Reduction,
    Reservation,
    Route,
    Sender,
    Versioned,
    Wire,
)
from rollmill.channels.routing import round_robin
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire
from rollmill.channels.transport.handshake import new_token
from rollmill.channels.waiting import Abandon

__all__ = [
    "Abandon",
    "Abandoned",
    "Address",
    "Broker",
    "ScopedBroker",
    "BrokerServer",
    "ChannelClosed",
    "Damaged",
    "Doorbell",
    "Gathered",
    "Header",
    "Layout",
    "LocalBroker",
    "MemoryWire",
    "ReceivedMessage",
    "LatestReader",
    "LatestWriter",
    "Receiver",
    "Reduction",
    "Refused",
    "RemoteBroker",
    "Reservation",
    "Route",
    "Sender",
    "ChannelStatistics",
    "TcpWire",
    "TimedOut",
    "Versioned",
    "Wire",
    "new_token",
    "round_robin",
]
