"""How a channel says no. Each can be raised at either end, whatever carries the channel."""

from rollmill.core.errors import RollmillError


class ChannelClosed(RollmillError):
    """The other end closed the channel, gave up, or was replaced; waiting longer cannot help."""

    exit_code = 1


class TimedOut(RollmillError):
    """Nothing came, or no room was made, within the timeout; the channel is as it was."""

    exit_code = 1


class Abandoned(RollmillError):
    """The run is being stopped: `abandon` said so while this end was waiting."""

    exit_code = 1


class Damaged(RollmillError):
    """A message does not say what it must: its stamp, its size or its checksum is wrong."""

    exit_code = 1


class Refused(RollmillError):
    """The broker or the other end did not accept the token, or asked for something not on offer."""


class ConnectionLost(RollmillError):
    """The stream to another process ended; whoever uses it dials again, or closes its channel."""

    exit_code = 1
