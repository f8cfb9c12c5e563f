"""How a worker and its coordinator find each other, and how each makes sure that the other knows the token.

Addresses are text: `unix:/path`, `unix:@name` (of Linux: a name without a file) or `tcp:host:port`. The token
itself never travels: each side sends a nonce, and the other answers with its HMAC-SHA256 under the token.
"""

import hashlib
import hmac
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.channels import Damaged, Refused
from rollmill.core.errors import UsageError
from rollmill.execution.workers.frames import STRANGERS, encode, receive_frame, send_frame
from rollmill.execution.workers.jobs import Job
from rollmill.execution.workers.messages import Message
from rollmill.execution.workers.process_tree import ON_LINUX

HANDSHAKE_SECONDS = 10.0


class Claim(NamedTuple):
    """Whom a peer that knows the token says it is."""

    name: str
    attempt: int


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that reaches it.

    Args:
        address: port 0 takes a free one, and `unix:` a free name.

    Raises:
        UsageError: the address cannot be listened on.
    """
    address = _free_name() if address == "unix:" else address
    family, where = _parse(address)
    listener = socket.socket(family)
    try:
        listener.bind(where)
        listener.listen()
    except OSError as error:
        listener.close()
        raise UsageError(f"{address} cannot be listened on: {error}.") from error
    return listener, address if family != socket.AF_INET else f"tcp:{where[0]}:{listener.getsockname()[1]}"


def let_go(address: str) -> None:
    """Removes the file of an address that nobody listens on any more."""
    _, _, path = address.partition("unix:/")
    if path:
        Path("/", path).unlink(missing_ok=True)


def ask(peer: socket.socket, token: bytes) -> Claim:
    """The coordinator's side: whom the peer claims to be, once it has shown that it knows the token.

    Raises:
        Refused: it does not know the token.
        Damaged: it speaks another language.
        OSError: it is gone, or too slow.
    """
    peer.settimeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex(16)
    _say(peer, ".challenge", nonce=nonce)
    match _hear(peer, ".answer"):
        case {"name": str(name), "attempt": int(attempt), "nonce": str(theirs), "proof": str(proof)}:
            if not hmac.compare_digest(proof, _prove(token, "worker", nonce, name, attempt)):
                refuse(peer, "the token is wrong")
                raise Refused(f"somebody who claims to be {name!r} does not know the token.")
            _say(peer, ".proof", proof=_prove(token, "coordinator", theirs))
            return Claim(name, attempt)
    raise Damaged("an answer to the challenge lacks a name, an attempt, a nonce or a proof.")


def welcome(peer: socket.socket, **settings: float) -> None:
    """Takes the peer in; it is told these settings."""
    _say(peer, ".welcome", **settings)
    peer.settimeout(None)


def refuse(peer: socket.socket, reason: str) -> None:
    """Tells the peer why it is not taken in."""
    _say(peer, ".refused", reason=reason)


def report(address: str, token: bytes, job: Job) -> tuple[socket.socket, dict[str, Any]]:
    """The worker's side: a connection on which it was welcomed as `job`, and the settings that it was told.

    Raises:
        Refused: the coordinator does not take it, or does not know the token itself.
        Damaged: the other side speaks another language.
        OSError: nobody is there.
    """
    family, where = _parse(address)
    peer = socket.socket(family)
    try:
        peer.settimeout(HANDSHAKE_SECONDS)
        peer.connect(where)
        if family == socket.AF_INET:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = _introduce(peer, token, job)
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return peer, settings


def _introduce(peer: socket.socket, token: bytes, job: Job) -> dict[str, Any]:
    challenge, nonce = _hear(peer, ".challenge"), secrets.token_hex(16)
    proof = _prove(token, "worker", str(challenge.get("nonce")), job.name, job.attempt)
    _say(peer, ".answer", name=job.name, attempt=job.attempt, nonce=nonce, proof=proof)
    theirs = str(_hear(peer, ".proof").get("proof"))
    if not hmac.compare_digest(theirs, _prove(token, "coordinator", nonce)):
        raise Refused("whoever listens at this address does not know the token.")
    return _hear(peer, ".welcome")


def _free_name() -> str:
    if ON_LINUX:
        return f"unix:@rollmill-{secrets.token_hex(8)}"
    return f"unix:/tmp/rollmill-{secrets.token_hex(8)}"  # such a path has at most 104 bytes


def _parse(address: str) -> tuple[socket.AddressFamily, Any]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, f"\0{rest[1:]}" if rest.startswith("@") else rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdigit():
        return socket.AF_INET, (host, int(port))
    raise UsageError(f"address {address!r} is none: write tcp:host:port, unix:/path or unix:@name.")


def _prove(token: bytes, *parts: str | int) -> str:
    return hmac.new(token, "\n".join(map(str, parts)).encode(), hashlib.sha256).hexdigest()


def _say(peer: socket.socket, kind: str, **fields: Any) -> None:
    send_frame(peer, encode(Message(kind, fields, {}), STRANGERS))


def _hear(peer: socket.socket, kind: str) -> dict[str, Any]:
    message = receive_frame(peer, STRANGERS)
    if message is None:
        raise Damaged("the other side closed the connection before it was agreed on.")
    if message.kind == ".refused":
        raise Refused(f"the coordinator refused this worker: {message.fields.get('reason')}.")
    if message.kind != kind:
        raise Damaged(f"{message.kind!r} came where {kind!r} belongs.")
    return message.fields
