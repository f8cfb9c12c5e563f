"""Serves a broker to other processes. File descriptors need a Unix socket, and all other requests also work over
TCP.

Requests and answers are JSON objects. If a request failed, the answer has the key "error".

    {"ask": "segment", "name": ..., "nbytes": ..., "digest": ...}   -> {} and one file descriptor
    {"ask": "doorbell", "name": ...}                                -> {} and one or two file descriptors
    {"ask": "agree", "name": ..., "digest": ...}                    -> {}
    {"ask": "claim", "name": ..., "segment": ..., "word": ...}      -> {"incarnation": number}
    {"ask": "confirm", "name": ..., "incarnation": number, "segment": ..., "word": ...}    -> {}
    {"ask": "drop", "name": ...}                                    -> {}
    {"ask": "holder", "name": ...}                                  -> {"incarnation": number}
    {"ask": "announce", "name": ..., "address": [host, port], "incarnation": number}       -> {}
    {"ask": "lookup", "name": ...}                                  -> {"address": [host, port] or null}
"""

import socket
from typing import Any

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.errors import Refused
from rollmill.channels.transport.addresses import listen, remove_socket_file
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE, Admission
from rollmill.channels.transport.listener import Listener
from rollmill.core.errors import RollmillError


class BrokerServer:
    """Serves a `LocalBroker` to other processes until it is closed. The coordinator uses the broker directly.

    Clients must know the run's token. Without a `host` it listens on a Unix socket only. With one, it also listens
    at this address for processes on other hosts. Port 0 picks a free port.
    """

    def __init__(self, broker: LocalBroker, token: str, *, host: str | None = None, port: int = 0) -> None:
        self._broker = broker
        sock, self.address = listen("unix:")
        """Address for `RemoteBroker`s in processes of this host."""
        self.tcp_address: str | None = None
        """Address for `RemoteBroker`s in processes of other hosts, which get no shared memory."""
        self._listeners = [self._listener(sock, token, in_host=True)]
        if host is not None:
            sock, self.tcp_address = listen(f"tcp:{host}:{port}")
            self._listeners.append(self._listener(sock, token, in_host=False))

    def close(self) -> None:
        """Ends all connections of clients. The broker itself stays open."""
        for listener in self._listeners:
            listener.close()
        remove_socket_file(self.address)

    def _listener(self, sock: socket.socket, token: str, *, in_host: bool) -> Listener:
        return Listener(sock, token.encode(), lambda peer, admission: self._begin(peer, admission, in_host))

    def _begin(self, peer: socket.socket, admission: Admission, in_host: bool) -> None:
        connection = Connection(peer)
        connection.send(admission.answer, timeout=PATIENCE)
        self._serve(connection, in_host=in_host)

    def _serve(self, connection: Connection, *, in_host: bool) -> None:
        while True:
            request, _ = connection.receive_json()
            try:
                answer, descriptors = self._answer(request, in_host)
            except RollmillError as error:
                answer, descriptors = {"error": str(error)}, []
            except (KeyError, TypeError, ValueError) as error:
                answer, descriptors = {"error": f"not a request: {error!r}"}, []
            connection.send_json(answer, descriptors=descriptors)

    def _answer(self, request: dict[str, Any], in_host: bool) -> tuple[dict[str, Any], list[int]]:
        name = str(request["name"])
        match request["ask"]:
            case "segment" | "doorbell" if not in_host:
                raise Refused("shared memory works only within one host. hint: use TcpWire between hosts.")
            case "segment":
                nbytes, digest = int(request["nbytes"]), str(request["digest"])
                return {}, [self._broker.segment_descriptor(name, nbytes=nbytes, digest=digest)]
            case "doorbell":
                return {}, self._broker.doorbell(name).descriptors()
            case _:
                return self._answer_without_descriptors(name, request), []

    def _answer_without_descriptors(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        match request["ask"]:
            case "agree":
                self._broker.agree(name, digest=str(request["digest"]))
                return {}
            case "claim":
                segment, word = request.get("segment"), int(request.get("word", 0))
                return {"incarnation": self._broker.claim(name, segment=segment, word=word)}
            case "confirm":
                segment, word = str(request["segment"]), int(request["word"])
                self._broker.confirm(name, int(request["incarnation"]), segment=segment, word=word)
                return {}
            case "drop":
                self._broker.drop(name)
                return {}
            case "holder":
                return {"incarnation": self._broker.holder(name)}
            case "announce":
                host, port = request["address"]
                self._broker.announce(name, (str(host), int(port)), int(request["incarnation"]))
                return {}
            case "lookup":
                return {"address": self._broker.lookup(name)}
            case unknown:
                raise Refused(f"unknown request {unknown!r} to the broker.")
