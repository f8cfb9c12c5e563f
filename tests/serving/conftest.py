"""Servers in this process, on a thread of their own, and the clients of benchmarks/serving_load.py."""

import contextlib
import json
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("httptools", reason="serving is an extra")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rollmill  # noqa: E402
from rollmill.policies.loading import load_weights
from rollmill.serving import (  # noqa: E402
    Address,
    BatchedPolicy,
    BatchingRule,
    Server,
    ServerStatistics,
    limits_for_batches,
    listen,
)
from small_ppo import SIZES, STEPS

QUIET = {"quiet": True, "tensorboard": False}


def train(root, env="CartPole-v1", **config):
    graph = rollmill.ppo(env, **({"total_timesteps": STEPS, **SIZES} | config))
    return rollmill.train(graph, run_dir=root / "run", **QUIET).directory


@pytest.fixture(scope="session")
def cartpole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("cartpole"))


@pytest.fixture(scope="session")
def t_maze(tmp_path_factory):
    network = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,))
    return train(tmp_path_factory.mktemp("maze"), "TMaze-v0", network=network)


@contextlib.contextmanager
def serving(run, *, max_batch=8, max_wait=0.0, token=None, stochastic=False, policy=None, **limits):
    """A server of a run; `ask(path, document)` returns status and document of an answer."""
    sessions = limits.get("sessions", 1024)
    policy = policy or BatchedPolicy(
        load_weights(run), max_batch=max_batch, sessions=sessions, stochastic=stochastic
    )
    policy.compile()
    known = limits_for_batches(max_batch, policy.num_scalars)
    known = known.__class__(**(vars(known) | limits))
    server = Server(policy, BatchingRule(max_batch, max_wait), known, ServerStatistics(), token=token)
    listener, ready, stop, codes = listen(Address()), threading.Event(), threading.Event(), []
    port = listener.getsockname()[1]
    work = lambda: codes.append(server.run(listener, stop.is_set, ready=ready.set))
    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    try:
        yield SimpleNamespace(
            port=port,
            policy=policy,
            stop=stop,
            thread=thread,
            codes=codes,
            server=server,
            ask=lambda *arguments, **options: ask(port, *arguments, **options),
            connect=lambda: socket.create_connection(("127.0.0.1", port), timeout=20),
        )
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def ask(port, path, document=None, *, method=None, headers=None):
    data = None if document is None else json.dumps(document).encode()
    request = Request(f"http://127.0.0.1:{port}{path}", data, headers or {}, method=method)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def answers(sock, count):
    """Statuses and documents of the next `count` answers on a connection; fewer if it ends."""
    data, found = b"", []
    while len(found) < count:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 "):
            found.append((100, None))
            data = rest
            continue
        if separator:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(rest) >= length:
                found.append((int(head.split()[1]), json.loads(rest[:length])))
                data = rest[length:]
                continue
        more = sock.recv(65536)
        if not more:
            break
        data += more
    return found
