"""The handshake in which a worker proves to its coordinator that it knows the token, and says which worker it is.

`channels.transport.handshake` checks the token and carries the worker's claim: its name and its attempt.
"""

import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.errors import ConnectionLost, Damaged, Refused, TimedOut
from rollmill.channels.transport.addresses import connect
from rollmill.channels.transport.dialling import reach
from rollmill.channels.transport.handshake import PATIENCE, Admission
from rollmill.channels.transport.tcp_options import watch_link
from rollmill.core.code_identity import CodeIdentity, code_from_json, own_code
from rollmill.core.json_data import parse_object
from rollmill.processes.framing import encode, receive_frame, send_frame
from rollmill.processes.jobs import Job
from rollmill.processes.messages import WorkerMessage


class Identity(NamedTuple):
    """The identity that a peer claims after it has proved that it knows the token."""

    name: str
    attempt: int
    details: Mapping[str, Any]
    """Everything that the peer claims."""
    code: CodeIdentity | None = None
    """Identity of the code that the peer runs, or None if it does not say, as in older versions."""
    host: str = ""
    """Address of the peer's host. Empty for this host."""


def claim_of(admission: Admission) -> Identity:
    """Reads the identity that an authenticated peer claims. Raises `Damaged` if the claim is malformed."""
    fields = parse_object(admission.claim, where="a worker's claim", error=Damaged)
    match fields:
        case {"name": str(name), "attempt": int(attempt)}:
            return Identity(name, attempt, fields, code_from_json(fields.get("code")))
    raise Damaged("a worker's claim has no name or no attempt.")


def other_code(code: CodeIdentity | None, host: str) -> str:
    """Returns the reason to reject a worker whose code differs from this process's. Empty if it does
    not differ.
    """
    where = f"on {host}" if host else "in its process"
    if code is None:
        return f"the rollmill {where} is an older version, which does not identify its code"
    differences = own_code().differences(code)
    if not differences:
        return ""
    return (
        f"the code {where} differs from the driver's: {'; '.join(differences)}. hint: install the same version "
        "on all hosts"
    )


def welcome(peer: socket.socket, admission: Admission, **settings: float) -> None:
    """Accepts a peer, sends it these settings, and starts to watch the link to it."""
    watch_link(peer)
    _say(peer, admission, ".welcome", **settings)


def refuse(peer: socket.socket, admission: Admission, reason: str) -> None:
    """Tells a peer why it is rejected, and closes the connection."""
    _say(peer, admission, ".refused", reason=reason)


def connect_as(address: str, token: bytes, job: Job, **details: Any) -> tuple[socket.socket, dict[str, Any]]:
    """Connects a worker to its coordinator. Returns the connection and the settings that the coordinator sent.

    Raises `Refused` if the coordinator rejects the worker or does not know the token, `Damaged` if the other side
    speaks another protocol, and an `OSError` if nothing answers in time.
    """
    code = own_code()._asdict()
    claim = json.dumps({"name": job.name, "attempt": job.attempt, "code": code, **details}).encode()
    try:
        peer = reach(lambda: connect(address, timeout=PATIENCE), token, claim)
    except (ConnectionLost, TimedOut) as error:
        raise ConnectionError(f"{address} does not answer: {error}") from error
    try:
        settings = _hear_welcome(peer)
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return peer, settings


def _say(peer: socket.socket, admission: Admission, kind: str, **fields: Any) -> None:
    peer.settimeout(PATIENCE)
    send_frame(peer, [admission.answer, *encode(WorkerMessage(kind, fields, {}))])
    peer.settimeout(None)


def _hear_welcome(peer: socket.socket) -> dict[str, Any]:
    peer.settimeout(PATIENCE)
    message = receive_frame(peer)
    if message is None:
        raise Damaged("the coordinator closed the connection before it had accepted this worker.")
    if message.kind == ".refused":
        raise Refused(f"the coordinator rejected this worker: {message.fields.get('reason')}.")
    if message.kind != ".welcome":
        raise Damaged(f"expected a welcome, got {message.kind!r}.")
    return message.fields
