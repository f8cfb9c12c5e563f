"""Both ends of a connection prove that they know a token, which itself never travels.

    acceptor -> dialler   greeting, nonce
    dialler  -> acceptor  nonce, HMAC-SHA256(token, "dialler", both nonces, claim), length of the claim, claim
    acceptor -> dialler   "+", HMAC-SHA256(token, "acceptor", both nonces);  or "-" where the proof was wrong

The claim says who the dialler is, where the acceptor wants to know it. A connection that ends without an answer
was not refused: the acceptor had no time or no room, and the dialler may try again.

Each side is a *dialogue*: a generator that yields what is to be sent and how many bytes must then come, and is
sent these bytes. So one thread can lead many at once (`listener`), or one to its end (`converse`).

What follows is neither encrypted nor signed: keep to loopback, or to a network that is trusted.
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
LONGEST_CLAIM = 4096
ACCEPTED, REFUSED = b"+", b"-"
ANSWER_BYTES = 1 + PROOF_BYTES

PATIENCE = 10.0
"""Seconds within which the other end must have said what is asked of it."""

Step: TypeAlias = tuple[bytes, int]
"""Bytes to send, and the number of bytes to receive afterwards."""

Dialogue: TypeAlias = Generator[Step, bytes, T]


class Admission(NamedTuple):
    """A dialler that knows the token."""

    claim: bytes
    answer: bytes
    """To be sent as soon as somebody serves the connection: until then the dialler may try again."""


def new_token() -> str:
    """A token that nobody can guess: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def admit(token: bytes) -> Dialogue[Admission]:
    """The acceptor's side.

    Raises:
        Refused: the dialler does not know the token, or claims too much.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    head = yield GREETING + own, NONCE_BYTES + PROOF_BYTES + LENGTH.size
    theirs, proof = head[:NONCE_BYTES], head[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    (length,) = LENGTH.unpack(head[-LENGTH.size :])
    if length > LONGEST_CLAIM:
        raise Refused(f"it claims to be somebody in {length:,} bytes; at most {LONGEST_CLAIM:,} are taken.")
    claim = (yield b"", length) if length else b""
    if not hmac.compare_digest(proof, _proof(token, b"dialler", own + theirs, claim)):
        yield REFUSED + bytes(PROOF_BYTES), 0
        raise Refused("it does not know the run's token.")
    return Admission(claim, ACCEPTED + _proof(token, b"acceptor", own + theirs))


def present(token: bytes, claim: bytes = b"") -> Dialogue[None]:
    """The dialler's side.

    Raises:
        Refused: the acceptor does not take the token, or does not know it itself.
    """
    first = yield b"", len(GREETING) + NONCE_BYTES
    if not first.startswith(GREETING):
        raise Refused("what listens there is not a rollmill of this version.")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = first[len(GREETING) :] + own
    head = own + _proof(token, b"dialler", nonces, claim) + LENGTH.pack(len(claim))
    answer = yield head + claim, ANSWER_BYTES
    if not answer.startswith(ACCEPTED):
        raise Refused("the connection was refused: the token is not that of the run.")
    if not hmac.compare_digest(answer[1:], _proof(token, b"acceptor", nonces)):
        raise Refused("what listens there does not know the run's token.")


def converse(sock: socket.socket, dialogue: Dialogue[T], *, timeout: float) -> T:
    """Leads a dialogue to its end; the timeout is that of the whole.

    Raises:
        Refused: see the dialogue.
        ConnectionLost: the other end went away.
        TimedOut: it took too long.
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
        raise TimedOut(f"the other end did not prove itself within {timeout:g} s.") from error
    except OSError as error:
        raise ConnectionLost(f"the connection was lost: {error}.") from error


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    received = bytearray()
    while len(received) < count:
        sock.settimeout(_seconds_left(deadline))
        more = sock.recv(count - len(received))
        if not more:
            raise ConnectionLost("the other end closed the connection.")
        received += more
    return bytes(received)


def _seconds_left(deadline: Deadline) -> float:
    if (left := deadline.left()) <= 0:
        raise TimeoutError
    return left


def _proof(token: bytes, role: bytes, nonces: bytes, claim: bytes = b"") -> bytes:
    return hmac.digest(token, role + nonces + claim, "sha256")
