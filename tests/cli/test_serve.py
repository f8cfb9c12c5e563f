"""`rollmill serve` as a user runs it: addresses, tokens, workers, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.request import Request, urlopen

import pytest

from wordings import raises

from .conftest import SMALL

pytest.importorskip("httptools", reason="serving is an extra")

ZEROS = {"observation": [0.0, 0.0, 0.0, 0.0]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment_variables):
    root = tmp_path_factory.mktemp("serve")
    words = ["train", "ppo", "CartPole-v1", "--total-timesteps", "64", "--no-tensorboard", "--run-dir", "run"]
    command = [sys.executable, "-m", "rollmill", *words, *SMALL]
    subprocess.run(command, cwd=root, env=environment_variables, capture_output=True, check=True)
    return root / "run"


@pytest.fixture
def serve(rollmill, trained, tmp_path):
    """Starts a server, and returns its process and address once it is ready."""
    started = []

    def start(*options):
        file = tmp_path / "address"
        process = rollmill.start("serve", trained, "--address-file", file, "--max-batch", "4", *options)
        started.append(process)
        deadline = time.monotonic() + 120
        while not file.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process, file.read_text().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask(url, path="/act", document=None, **headers):
    data = None if document is None else json.dumps(document).encode()
    with urlopen(Request(url + path, data, headers), timeout=60) as answer:
        return json.load(answer)


def stopped(process, number):
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_ends_the_server_after_its_answers(serve, trained, number, code):
    process, url = serve()
    assert ask(url, document=ZEROS)["action"] in (0, 1)
    found, output, errors = stopped(process, number)
    assert found == code and output == f"serving {trained} at {url}\n"
    assert errors == f"stopped by {signal.Signals(number).name}\n"


@pytest.mark.slow
def test_a_unix_socket_is_for_this_user_alone_and_gone_afterwards(serve, tmp_path):
    path = tmp_path / "policy.sock"
    process, url = serve("--socket", path)
    assert url == f"unix:{path}" and path.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    process.kill()
    process.communicate()
    assert path.exists()
    (tmp_path / "address").unlink()
    process, _ = serve("--socket", path)  # takes the place of a socket that nobody listens at
    assert stopped(process, signal.SIGTERM)[0] == 143 and not path.exists()


@pytest.mark.slow
def test_a_token_opens_the_server_to_other_machines(serve, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    _, url = serve("--host", "0.0.0.0", "--token-file", token)
    local = url.replace("0.0.0.0", "127.0.0.1")
    assert ask(local, document=ZEROS, Authorization="Bearer 0123456789abcdef")["action"] in (0, 1)
    with pytest.raises(OSError, match="401"):
        ask(local, document=ZEROS)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="workers are found in /proc")
def test_a_worker_that_is_killed_is_replaced_and_all_end_with_the_server(serve):
    process, url = serve("--workers", "2")
    first = workers_of(process.pid)
    assert len(first) == 2 and ask(url, "/metrics")["workers"] == 2
    os.kill(first[0], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(now := set(workers_of(process.pid))) < 2 or first[0] in now:
        assert ask(url, document=ZEROS)["action"] in (0, 1)
        assert time.monotonic() < deadline
    found, _, errors = stopped(process, signal.SIGTERM)
    assert found == 143 and f"worker {0} was ended by SIGKILL and is being replaced" in errors.replace(
        "worker 1", "worker 0"
    )
    assert not any(is_alive(worker) for worker in [*first, *now])


@pytest.mark.slow
def test_workers_end_when_the_server_is_killed(serve):
    process, _ = serve("--workers", "2")
    workers = workers_of(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(parent):
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return [int(word) for word in file.read().split()]


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-batch", "100"], ("max-batch-has-to-be", "100")),
        (["--max-wait-ms", "-1"], ("max-wait-ms-has-to", "-1")),
        (["--port", "65536"], ("has-to-lie-between-and", "port", "65536", "0", "65,535")),
        (["--workers", "0"], ("has-to-lie-between-and", "workers", "0", "1", "256")),
        (["--seed", "-1"], ("seed-has-to-lie-between", "-1", "4294967295")),
        (["--session-seconds", "inf"], ("session-seconds-has-to-be", "inf")),
        (["--host", "0.0.0.0"], ("host-can-be-reached-from", "0.0.0.0")),
        (["--host", "192.0.2.1"], ("host-can-be-reached-from", "192.0.2.1")),
        (["--token-file", "missing"], ("token-file-cannot-be-read", "missing")),
        (["--socket", "."], ("socket-exists-and-is-no",)),
        (["--checkpoint", "77"], ("has-no-checkpoint-there", "77")),
    ],
)
def test_bad_options_are_one_message(trained, tmp_path, monkeypatch, options, message):
    from rollmill.cli import serve as command

    monkeypatch.chdir(tmp_path)
    with raises(*message):
        command.run([str(trained), *options])


def test_tokens_that_protect_nothing_are_refused(tmp_path):
    from rollmill.serving import Address, read_token

    file = tmp_path / "token"
    for text, mode, message in (
        ("short", 0o600, ("token-file-has-to-hold", "16", "4,096")),
        ("two words 0123456789", 0o600, ("token-file-has-to-hold",)),
        ("0123456789abcdef", 0o644, ("token-file-can-be-read",)),
    ):
        file.write_text(text)
        file.chmod(mode)
        with raises(*message):
            read_token(file, Address())
    assert read_token(None, Address("localhost")) is None and read_token(None, Address("::1")) is None
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert read_token(file, Address("0.0.0.0")) == b"0123456789abcdef"


def test_an_address_file_of_another_server_stays(rollmill, tmp_path):
    file = tmp_path / "address"
    file.write_text("http://127.0.0.1:1\n")
    done = rollmill("serve", tmp_path / "no-run", "--address-file", file)
    assert done.returncode == 2 and file.read_text() == "http://127.0.0.1:1\n"


def test_a_port_in_use_and_a_socket_in_use_are_refused(tmp_path):
    from rollmill.serving import Address, listen

    with listen(Address()) as taken, raises("cannot-listen-at", "127.0.0.1:", "--port 0"):
        listen(Address(port=taken.getsockname()[1]))
    path = tmp_path / "s"
    with listen(Address(path=path)), raises("socket-is-in-use-by"):
        listen(Address(path=path))


@pytest.mark.slow
def test_workers_are_refused_for_a_recurrent_policy_with_one_message(rollmill, tmp_path):
    words = ["--network.torso", "gru", "--total-timesteps", 64, "--run-dir", "maze", "--no-tensorboard", *SMALL]
    assert rollmill("train", "ppo", "TMaze-v0", *words).returncode == 0
    done = rollmill("serve", "maze", "--workers", 2)
    assert done.returncode == 2 and done.stderr.count("is not supported for a recurrent policy") == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
