"""Children forked off a command: how they begin and end, and how signals reach them."""

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from rollmill.core.process_tree import ON_LINUX
from rollmill.processes import forks

pytestmark = pytest.mark.skipif(not ON_LINUX, reason="children are forked on Linux")

COMMAND = """
import os, signal, subprocess, sys, tempfile, time
from rollmill.core.process_tree import end_with_parent
from rollmill.processes import forks

words = forks.fork_children(["json"])
if words is not None:  # a child
    case = words[1]
    end_with_parent(int(words[0]), signal.SIGTERM)
    leads = os.getsid(0) == os.getpid()
    print(case, os.getppid() == int(words[0]), leads, os.fsencode(os.environ["NAME"]), "json" in sys.modules)
    print(sys.stdin.read(), "HOME" in os.environ, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert held == {signal.SIGUSR1}, held
    if case == "waits":
        time.sleep(3600)
    sys.exit(int(case))

NAME = b"\\xff of a child"
server = forks.forks_of_this_command()
assert server is not None


def start(*words):
    with tempfile.TemporaryFile() as order, open("log", "ab") as log:
        order.write(b"an order")
        order.seek(0)
        return server.start(words, {"NAME": os.fsdecode(NAME)}, [order.fileno(), log.fileno()])
"""


def test_the_state_of_sources_leaves_out_the_lock_of_an_editor(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "PACKAGE", tmp_path)
    (tmp_path / "module.py").write_text("one = 1")
    (tmp_path / ".#module.py").symlink_to("somebody@host.1")
    assert [(name, size) for name, size, _ in forks._state_of_sources()] == [(str(tmp_path / "module.py"), 7)]


def run(code: str, folder, **options) -> subprocess.Popen:
    """Runs a command that forks."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", COMMAND + textwrap.dedent(code)]
    return subprocess.Popen(words, cwd=folder, env=environment, **options)


def test_a_forked_child_begins_and_ends_as_one_that_was_started(tmp_path):
    code = """
        first, second = start("0"), start("3")
        assert second.wait() == 3 and first.wait(60) == 0 and first.poll() == 0
        waits = start("waits")
        try:
            waits.wait(0.2)
        except subprocess.TimeoutExpired:
            waits.terminate()
        assert waits.wait(60) == -signal.SIGTERM
        waits.send_signal(signal.SIGKILL)  # without effect
        orphan = start("waits")
        os.kill(server._pid, signal.SIGKILL)
        assert orphan.wait(60) == forks.LOST and start("0") is None
        forks.end_forks()
        assert forks.forks_of_this_command() is None
    """
    assert run(code, tmp_path).wait(60) == 0
    lines = sorted((tmp_path / "log").read_text().splitlines())
    told = r"True True b'\xff of a child' True"
    assert set(lines) == {*(f"{case} {told}" for case in ("0", "3", "waits")), "an order False True"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_forked_child_is_told_to_stop_when_its_command_is_gone(tmp_path, number):
    code = """
        waits = start("waits")
        print(waits.pid, flush=True)
        time.sleep(3600)
    """
    with run(code, tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as command:
        child = os.pidfd_open(int(command.stdout.readline()))
        if number == signal.SIGTERM:  # as a batch system does, which tells all processes of a job
            os.killpg(command.pid, number)
        else:
            command.kill()
        assert select.select([child], [], [], 60)[0]
        os.close(child)


def test_nothing_is_forked_once_the_sources_have_changed_or_a_second_thread_runs(tmp_path):
    code = """
        import threading
        forks.end_forks()
        thread = threading.Thread(target=time.sleep, args=(2,))
        thread.start()
        assert forks.fork_children([]) is None and forks.forks_of_this_command() is None
        thread.join()
        while forks.count_threads() > 1:  # the operating system ends a thread shortly after Python has joined it
            time.sleep(0.01)
        changed = iter([[], ["another"]])
        forks._state_of_sources = lambda: next(changed)
        assert forks.fork_children([]) is None
        server = forks.forks_of_this_command()
        assert start("0") is None
    """
    assert run(code, tmp_path).wait(60) == 0
