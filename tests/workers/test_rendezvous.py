"""The port at which the processes of a mesh meet: nobody else gets it before they do."""

import contextlib
import socket

import pytest

from rollmill.workers.replica.mesh import RendezvousPort


def place(meeting):
    host, port = meeting.address.split(":")
    return host, int(port)


def test_another_program_cannot_take_the_port_before_the_mesh_listens():
    with contextlib.closing(RendezvousPort("")) as meeting, pytest.raises(OSError, match="in use"):
        socket.create_server(place(meeting))


def test_a_service_that_shares_its_port_gets_all_connections():
    with contextlib.closing(RendezvousPort("")) as meeting, socket.socket() as service:
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        service.bind(place(meeting))
        service.listen()
        for _ in range(20):
            with socket.create_connection(place(meeting), timeout=5), service.accept()[0]:
                pass


def test_the_port_is_free_once_it_is_released():
    with contextlib.closing(RendezvousPort("")) as meeting:
        before = place(meeting)
    with socket.create_server(before):
        pass
