"""Links to the hosts of workers: when silence is told, and when a worker is taken for lost."""

import socket
import threading
from types import SimpleNamespace

import pytest
from worker_jobs import job, obeys

from rollmill.processes.cluster import node_health as reach
from rollmill.processes.connection import WorkerConnection
from rollmill.processes.events import Audible, Lost, Silent
from rollmill.processes.handshake import connect_as
from rollmill.processes.launchers import Exit
from rollmill.processes.links import Link
from rollmill.processes.supervisor import Supervisor

HOST = "10.0.0.2"
JOB = job(obeys)


def test_silence_is_told_once_after_ten_seconds_and_its_end_too():
    link = Link(JOB)
    silences = [0.5, 4.0, 10.0, 10.5, 15.0, 0.1, 3.0, 11.0]
    assert [link.look(silence, HOST) for silence in silences] == [
        *(None, None, None),
        Silent(JOB, 10.5, HOST),
        None,
        Audible(JOB, 15.0, HOST),
        None,
        Silent(JOB, 11.0, HOST),
    ]


def test_a_host_is_doubted_after_a_probe_without_answer_and_lost_after_twenty_seconds():
    link, doubted, lost = Link(JOB), [], []
    for silence in (0.0, 6.0, 6.5, 19.9, 20.0):
        link.look(silence, HOST)
        doubted.append(link.is_doubtful)
        lost.append(link.is_lost)
    assert doubted == [False, False, True, True, True]
    assert lost == [False, False, False, False, True]


class FarLauncher:
    """Starts nothing; notes what is asked of it."""

    def __init__(self):
        self.asked = []

    def start(self, job, address, token):
        self.token = token
        return job.name

    def output(self, handle):
        return None

    def exit(self, handle):
        return Exit(None) if ("abandon", handle) in self.asked else None

    def kill(self, handle, *, at_once=True):
        self.asked.append(("kill", handle))

    def abandon(self, handle):
        self.asked.append(("abandon", handle))

    def leaving(self, handle):
        return ""

    def condition(self, handle):
        return ""

    def close(self):
        pass


@pytest.fixture
def far(monkeypatch):
    """A supervisor whose only worker, a connection of this process, has a link as silent as the test says."""
    silence = [0.0]
    monkeypatch.setattr(WorkerConnection, "silence", lambda connection: silence[0])
    launcher = FarLauncher()
    with Supervisor([JOB], launcher=launcher, address="tcp:127.0.0.1:0", display=lambda line: None) as supervisor:
        supervisor.start()
        peer, _ = connect_as(supervisor.address, launcher.token, JOB)
        yield SimpleNamespace(supervisor=supervisor, launcher=launcher, silence=silence)
        peer.close()


def test_a_worker_on_a_silent_host_is_lost_without_waiting_for_its_end(far):
    far.silence[0] = 12.0
    assert far.supervisor.events(5.0) == [Silent(JOB, 12.0, "127.0.0.1")]
    assert far.supervisor.unreachable_hosts() == {"actor/0": "127.0.0.1"}
    far.silence[0] = 20.0
    (lost,) = far.supervisor.events(5.0)
    assert isinstance(lost, Lost) and lost.reason == "its host 127.0.0.1 has acknowledged nothing for 20 s"
    assert far.launcher.asked == [("abandon", "actor/0")]


def test_stopping_does_not_wait_for_a_host_that_may_be_out_of_reach(far):
    far.silence[0] = 7.0
    assert far.supervisor.events(0.1) == []
    far.supervisor.stop("actor/0", grace_seconds=60.0)
    assert far.launcher.asked == [("abandon", "actor/0")]


def node(name, port, *, alive=True):
    return {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": alive}


def ray_of(*nodes, client=False):
    connected = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: client))
    return SimpleNamespace(util=SimpleNamespace(client=connected), nodes=lambda: list(nodes))


def test_nodes_that_do_not_answer_are_left_out_where_another_does():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as gone:
        there, away = here.getsockname()[1], gone.getsockname()[1]
        gone.close()
        nodes = [node("aa", there), node("bb", away), node("cc", away, alive=False)]
        assert reach.unreachable_nodes(ray_of(*nodes)) == {"bb": "127.0.0.1"}
        assert reach.unreachable_nodes(ray_of(node("bb", away))) == {}
        assert reach.unreachable_nodes(ray_of(*nodes, client=True)) == {}
    assert reach.selector_without({"bb": HOST, "aa": HOST}) == {"ray.io/node-id": "!in(aa, bb)"}
    assert reach.selector_without({}) == {}
    assert not [each for each in threading.enumerate() if each.name.startswith("rollmill-reach")]
