"""Wires of every kind, with ends that are closed when the test is over; processes at the other ends."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.tcp.wire import TcpWire
from rollmill.channels.transport.handshake import new_token


@pytest.fixture
def coordinator():
    """A broker, opened to other processes."""
    broker, token = LocalBroker(), new_token()
    server = BrokerServer(broker, token, host="127.0.0.1")
    yield SimpleNamespace(broker=broker, token=token, server=server)
    server.close()
    broker.close()


def wires_of(kind, coordinator):
    opened = []

    def open_wire(**options):
        """A wire like another thread or process would open one."""
        broker, token = coordinator.broker, coordinator.token
        if kind != "threads":
            address = coordinator.server.address if kind == "memory" else coordinator.server.tcp_address
            broker = RemoteBroker(address, token)
            opened.append(broker)
        wire = TcpWire(broker, token, **options) if kind == "tcp" else MemoryWire(broker, **options)
        opened.append(wire)
        return wire

    yield open_wire
    for end in reversed(opened):
        end.close()


@pytest.fixture(params=["threads", "memory", "tcp"])
def open_wire(request, coordinator):
    yield from wires_of(request.param, coordinator)


@pytest.fixture
def open_threads_wire(coordinator):
    yield from wires_of("threads", coordinator)


@pytest.fixture
def run_together():
    """Runs functions in threads of their own; what they return, or the first error."""

    def run(*functions):
        with ThreadPoolExecutor(len(functions)) as pool:
            return [future.result(timeout=30) for future in [pool.submit(function) for function in functions]]

    yield run
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


class Worker:
    """A process of `channel_worker.py`."""

    def __init__(self):
        command = [sys.executable, str(Path(__file__).parent / "channel_worker.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.is_idle = False

    def tell(self, role, wire, **options):
        if not self.is_idle:
            assert self.hear() == "ready"
        self.is_idle = False
        print(json.dumps({"role": role, "wire": wire, **options}), file=self._process.stdin, flush=True)

    def hear(self):
        line = self._process.stdout.readline()
        assert line, "the worker died"
        said, self.is_idle = json.loads(line)
        return said

    def kill(self):
        """As `kill -9` does."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="session")
def spare_workers():
    """Processes that are starting, or wait for a test that wants them."""
    spare = []
    yield spare
    for worker in spare:
        worker.kill()


@pytest.fixture
def workers(spare_workers):
    """`hire(count)` lends processes, and `kill(worker)` ends one for good."""
    hired = []

    def hire(count=1):
        while len(spare_workers) < count:
            spare_workers.append(Worker())
        fresh = [spare_workers.pop(0) for _ in range(count)]
        hired.extend(fresh)
        return fresh

    def kill(worker):
        hired.remove(worker)
        worker.kill()

    yield SimpleNamespace(hire=hire, kill=kill)
    for worker in hired:
        if worker.is_idle:
            spare_workers.append(worker)
        else:
            worker.kill()


@pytest.fixture(params=["memory", "tcp"])
def wire_of_workers(request, coordinator):
    """The arguments with which a worker opens a wire."""
    server = coordinator.server
    address = server.address if request.param == "memory" else server.tcp_address
    return [request.param, address, coordinator.token]


@pytest.fixture
def open_wire_beside(wire_of_workers, coordinator):
    """Opens a wire in this process, of the kind that workers use."""
    yield from wires_of(wire_of_workers[0], coordinator)
