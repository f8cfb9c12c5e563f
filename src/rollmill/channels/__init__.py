"""How edges between groups of fragments are carried: experience, weights, and reductions.

A `Wire` opens the ends of channels by name; it may run through threads, shared memory or TCP, and whoever
uses a channel does not see which. What moves are pytrees of arrays whose `Layout` both ends know
beforehand, as raw bytes. Nothing that comes from a channel is unpickled or evaluated.
"""

from rollmill.channels.base import (
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
from rollmill.channels.broker import LocalBroker
from rollmill.channels.broker_server import BrokerServer
from rollmill.channels.chapter import Chapter
from rollmill.channels.doorbell import Doorbell
from rollmill.channels.errors import Abandoned, ChannelClosed, Damaged, Refused, TimedOut
from rollmill.channels.handshake import new_token
from rollmill.channels.layout import Layout
from rollmill.channels.memory_wire import MemoryWire
from rollmill.channels.remote_broker import RemoteBroker
from rollmill.channels.routes import fixed, least_filled, round_robin
from rollmill.channels.tcp_wire import TcpWire
from rollmill.channels.waiting import Abandon

__all__ = [
    "Abandon",
    "Abandoned",
    "Address",
    "Broker",
    "Chapter",
    "BrokerServer",
    "ChannelClosed",
    "Damaged",
    "Doorbell",
    "Gathered",
    "Header",
    "Layout",
    "LocalBroker",
    "MemoryWire",
    "Message",
    "NewestReader",
    "NewestWriter",
    "Receiver",
    "Reduction",
    "Refused",
    "RemoteBroker",
    "Reservation",
    "Route",
    "Sender",
    "Statistics",
    "TcpWire",
    "TimedOut",
    "Versioned",
    "Wire",
    "fixed",
    "least_filled",
    "new_token",
    "round_robin",
]
