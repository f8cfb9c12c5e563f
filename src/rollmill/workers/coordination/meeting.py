"""A port of this host at which the processes of a mesh meet, held from its choice on."""

import socket


class MeetingPort:
    """A port that no other program gets before the first process of a mesh listens there.

    The socket that holds it never listens. It shares its port (SO_REUSEPORT) with sockets of the same user that
    ask for that, as the service of `jax.distributed` does.
    """

    def __init__(self) -> None:
        self._socket = _bound()

    @property
    def address(self) -> str:
        """The address, such as `127.0.0.1:40123`."""
        return "{}:{}".format(*self._socket.getsockname())

    def change(self) -> None:
        """Holds another port instead."""
        held, self._socket = self._socket, _bound()
        held.close()

    def close(self) -> None:
        """Holds no port any more."""
        self._socket.close()


def _bound() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
