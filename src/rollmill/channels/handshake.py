"""Both ends of a connection prove that they know the run's token, which itself never travels.

    acceptor -> dialler   greeting, nonce
    dialler  -> acceptor  nonce, HMAC-SHA256(token, "dialler" + both nonces)
    acceptor -> dialler   HMAC-SHA256(token, "acceptor" + both nonces), or the end of the stream

What follows is neither encrypted nor signed: keep to loopback, or to a network that is trusted.
"""

import hmac
import secrets

from rollmill.channels.connection import Connection
from rollmill.channels.errors import ConnectionLost, Refused

GREETING = b"rollmill channel 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
PATIENCE = 10.0
"""Seconds within which the other end must have proved itself."""


def new_token() -> str:
    """A token that nobody can guess: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def admit(connection: Connection, token: str) -> None:
    """The acceptor's side.

    Raises:
        Refused: the dialler does not know the token.
        ConnectionLost: it went away.
        TimedOut: it said nothing.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    connection.send(GREETING + own, timeout=PATIENCE)
    answer = connection.receive(NONCE_BYTES + PROOF_BYTES, timeout=PATIENCE)
    nonces = own + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(token, b"dialler", nonces)):
        raise Refused("a connection was refused: it does not know the run's token.")
    connection.send(_proof(token, b"acceptor", nonces), timeout=PATIENCE)


def present(connection: Connection, token: str) -> None:
    """The dialler's side.

    Raises:
        Refused: the acceptor took the token for a wrong one, or does not know it itself.
        ConnectionLost: it went away before it was asked anything.
        TimedOut: it said nothing.
    """
    first = connection.receive(len(GREETING) + NONCE_BYTES, timeout=PATIENCE)
    if not first.startswith(GREETING):
        raise Refused("what listens there is no end of a rollmill channel of this version.")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = first[len(GREETING) :] + own
    connection.send(own + _proof(token, b"dialler", nonces), timeout=PATIENCE)
    try:
        answer = connection.receive(PROOF_BYTES, timeout=PATIENCE)
    except ConnectionLost as error:
        raise Refused("the connection was refused: the token is not that of the run.") from error
    if not hmac.compare_digest(answer, _proof(token, b"acceptor", nonces)):
        raise Refused("what listens there does not know the run's token.")


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")
