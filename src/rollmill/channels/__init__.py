"""Channels, which carry the edges between groups of fragments: queues, latest values, and reductions.

A `Wire` opens the ends of channels by name, through threads, shared memory or TCP; the caller does not see
which. Messages are pytrees of arrays as raw bytes, and both ends know their `Layout` beforehand. Nothing
received from a channel is unpickled or evaluated.
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
