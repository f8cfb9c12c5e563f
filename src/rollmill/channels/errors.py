"""Errors of channels. Each can be raised at either end, by any transport."""

from rollmill.core.errors import RollmillError


class ChannelClosed(RollmillError):
    """The channel is closed: the other end closed it or gave up, or this end was replaced."""

    exit_code = 1


class TimedOut(RollmillError):
    """Nothing arrived, or no slot became free, within the timeout. The channel is unchanged."""

    exit_code = 1


class Abandoned(RollmillError):
    """The run is being stopped: `abandon` returned True while this end was waiting."""

    exit_code = 1


class Damaged(RollmillError):
    """A message is corrupt: its stamp, its size or its checksum is wrong."""

    exit_code = 1


class Refused(RollmillError):
    """The broker or the other end rejected the token or the request."""


class ConnectionLost(RollmillError):
    """The stream to another process ended. The caller reconnects, or closes the channel."""

    exit_code = 1
