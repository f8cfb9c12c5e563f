"""Errors of channels. Either end may raise them, with any transport."""

from rollmill.core.errors import RollmillError


class ChannelClosed(RollmillError):
    """Raised if a channel is closed: the other end closed it or gave up, or this end was replaced."""

    exit_code = 1


class TimedOut(RollmillError):
    """Raised if nothing arrived, or no slot became free, within the timeout. The channel is unchanged."""

    exit_code = 1


class Abandoned(RollmillError):
    """Raised if the run is being stopped: `abandon` returned True while a channel end was waiting."""

    exit_code = 1


class Damaged(RollmillError):
    """Raised if a message is corrupt: its sequence number, size or checksum is wrong."""

    exit_code = 1


class Refused(RollmillError):
    """Raised if the broker or the other end of a connection rejected the token or the request."""


class ConnectionLost(RollmillError):
    """Raised if the connection to another process ended. The caller reconnects, or closes the channel."""

    exit_code = 1
