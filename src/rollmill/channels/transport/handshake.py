"""Mutual authentication: both ends of a connection prove that they know a token, which is never sent.

    acceptor -> dialler   greeting, nonce
    dialler  -> acceptor  nonce, HMAC-SHA256(token, "dialler", both nonces, claim), length of the claim, claim
    acceptor -> dialler   "+", HMAC-SHA256(token, "acceptor", both nonces), or "-" if the proof was wrong

The claim says who the dialler is, for acceptors that need to know. A connection that ends without an answer was
not rejected: the acceptor had no time or no room, and the dialler may try again.

Each side is a *dialogue*: a generator that yields the bytes to send and the number of bytes to receive next, and
is sent the received bytes. One thread can therefore run many dialogues at once (`listener`), or a single dialogue
to its end (`converse`).

The traffic after the handshake is neither encrypted nor signed, so use loopback or a trusted network.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Generator
from typing import NamedTuple, TypeAlias, TypeVar

from rollmill.channels.errors import ConnectionLost, Refused, TimedOut
from rollmill.channels.waiting import Deadline

T = TypeVar("T")

GREETING = b"rollmill 2\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
LENGTH = struct.Struct("<H")
MAX_CLAIM = 4096
ACCEPTED, REFUSED = b"+", b"-"
ANSWER_BYTES = 1 + PROOF_BYTES

PATIENCE = 10.0
"""Seconds to wait for a message of the handshake."""

Step: TypeAlias = tuple[bytes, int]
"""One step of a handshake: the bytes to send, and the number of bytes to receive afterwards."""

Dialogue: TypeAlias = Generator[Step, bytes, T]


class Admission(NamedTuple):
    """An authenticated connection, as the acceptor sees it."""

    claim: bytes
    """The identity that the dialler claims."""
    answer: bytes
    """Bytes sent as soon as a thread serves the connection. A dialler that does not receive them tries again."""


def new_token() -> str:
    """Returns a new secret token of 64 random hexadecimal digits."""
    return secrets.token_hex(32)


def admit(token: bytes) -> Dialogue[Admission]:
    """Runs the acceptor's side of the handshake.

    Raises `Refused` if the dialler does not know the token, or if its claim is too long.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    head = yield GREETING + nonce, NONCE_BYTES + PROOF_BYTES + LENGTH.size
    peer_nonce, proof = head[:NONCE_BYTES], head[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    (length,) = LENGTH.unpack(head[-LENGTH.size :])
    if length > MAX_CLAIM:
        raise Refused(
            f"the claim of the connecting process has {length:,} bytes, more than the limit of {MAX_CLAIM:,}."
        )
    claim = (yield b"", length) if length else b""
    if not hmac.compare_digest(proof, _proof(token, b"dialler", nonce + peer_nonce, claim)):
        yield REFUSED + bytes(PROOF_BYTES), 0
        raise Refused("the connecting process does not have the run's token.")
    return Admission(claim, ACCEPTED + _proof(token, b"acceptor", nonce + peer_nonce))


def present(token: bytes, claim: bytes = b"") -> Dialogue[None]:
    """Runs the dialler's side of the handshake.

    Raises `Refused` if the acceptor rejects the token, or does not know it itself.
    """
    greeting = yield b"", len(GREETING) + NONCE_BYTES
    if not greeting.startswith(GREETING):
        raise Refused("the listener at this address does not run this version of Rollmill.")
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(GREETING) :] + nonce
    head = nonce + _proof(token, b"dialler", nonces, claim) + LENGTH.pack(len(claim))
    answer = yield head + claim, ANSWER_BYTES
    if not answer.startswith(ACCEPTED):
        raise Refused("the listener rejected the connection, because its token differs from the run's.")
    if not hmac.compare_digest(answer[1:], _proof(token, b"acceptor", nonces)):
        raise Refused("the listener at this address does not have the run's token.")


def converse(sock: socket.socket, dialogue: Dialogue[T], *, timeout: float) -> T:
    """Runs one side of a handshake on a socket, and returns its result. The timeout covers the whole handshake.

    Raises `TimedOut` after the timeout, `ConnectionLost` if the other end closed the connection, and `Refused` if
    the handshake fails.
    """
    deadline, received = Deadline(timeout), b""
    try:
        step = next(dialogue)
        while True:
            sock.settimeout(_seconds_left(deadline))
            sock.sendall(step[0])
            received = _receive(sock, step[1], deadline)
            step = dialogue.send(received)
    except StopIteration as end:
        return end.value
    except TimeoutError as error:
        raise TimedOut(f"the other end did not authenticate within {timeout:g} s.") from error
    except OSError as error:
        raise ConnectionLost(f"the connection was lost: {error}.") from error


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    received = bytearray()
    while len(received) < count:
        sock.settimeout(_seconds_left(deadline))
        chunk = sock.recv(count - len(received))
        if not chunk:
            raise ConnectionLost("the other end closed the connection.")
        received += chunk
    return bytes(received)


def _seconds_left(deadline: Deadline) -> float:
    if (left := deadline.left()) <= 0:
        raise TimeoutError
    return left


def _proof(token: bytes, role: bytes, nonces: bytes, claim: bytes = b"") -> bytes:
    return hmac.digest(token, role + nonces + claim, "sha256")
