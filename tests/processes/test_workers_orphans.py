"""Nothing outlives its coordinator, and nothing is left behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import worker_jobs
from worker_jobs import gone_within, job, until

from busy_machine import scaled
from rollmill.processes.events import Lost, Started
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture(scope="module")
def launcher():
    with LocalLauncher() as launcher:
        yield launcher


@pytest.fixture
def coordinator():
    """A process that coordinates workers, and the process ids of all that it has started."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", "import worker_jobs; worker_jobs.coordinate()"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    with process:
        yield process, [int(pid) for pid in process.stdout.readline().split()]
        process.kill()


def test_kill_9_of_the_coordinator_leaves_nothing_running(coordinator):
    process, pids = coordinator
    assert len(pids) == 9  # a fork server, two workers, three children of each
    os.kill(pids[1], signal.SIGSTOP)  # one that cannot hear that its coordinator is gone
    process.kill()
    assert gone_within(pids, scaled(2.0))


def test_ctrl_c_reaches_the_coordinator_alone_which_closes_in_order(coordinator):
    process, pids = coordinator
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=scaled(20))
    assert output.split() == ["closed"]
    assert process.returncode == 0
    assert gone_within(pids, 0.0)


def test_workers_die_with_their_fork_server_and_come_back_with_another(launcher):
    with Supervisor([job(worker_jobs.has_children)], launcher=launcher) as supervisor:
        supervisor.start()
        children = until(supervisor, "children").fields
        os.kill(launcher.servers[0].pid, signal.SIGKILL)
        lost = until(supervisor, Lost, seconds=scaled(2.0))
        assert "fork server" in lost.reason
        assert "SIGKILL" in lost.reason
        assert gone_within([children["pid"], *children["pids"]], 0.0)
        supervisor.replace(lost.job)
        assert until(supervisor, Started).job.attempt == 1


def test_where_imports_start_threads_workers_are_fresh_interpreters(tmp_path, monkeypatch):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = LocalLauncher(preload=["starts_a_thread"])
    with launcher, Supervisor([job(worker_jobs.has_children)], launcher=launcher) as supervisor:
        supervisor.start()
        children = until(supervisor, "children").fields
        assert launcher.servers[0].ready == {"ready": True, "forks": False, "threads": 2}
        assert b"processes.main" in Path(f"/proc/{children['pid']}/cmdline").read_bytes()
        os.kill(children["pid"], signal.SIGKILL)
        assert until(supervisor, Lost).exit_status == -signal.SIGKILL
        assert gone_within(children["pids"], 0.0)


def test_thirty_kills_leave_no_process_no_thread_and_no_file_descriptor(launcher):
    chance, pids = random.Random(0), set()
    jobs = [job(worker_jobs.obeys, replica) for replica in range(3)]
    with Supervisor(jobs[:1], launcher=launcher) as supervisor:  # so that there is a fork server already
        supervisor.start()
        until(supervisor, Started)
    before = _leftovers(launcher)
    with Supervisor(jobs, launcher=launcher, heartbeat_seconds=0.2) as supervisor:
        supervisor.start()
        until(supervisor, Started)
        for _ in range(30):
            worker = chance.choice(list(supervisor._workers.values()))
            while worker.handle.pid is None:
                time.sleep(0.001)
            pids.add(worker.handle.pid)
            os.kill(worker.handle.pid, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
            lost = until(supervisor, Lost, seconds=scaled(5.0))
            assert lost.job.name == worker.job.name
            supervisor.replace(lost.job)
    assert len(pids) == 30
    assert gone_within(pids, 0.0)
    assert _leftovers(launcher) == before


def test_a_daemon_that_a_worker_left_behind_ends_with_the_run():
    """It cannot be found by its mark: its environment is still that of the process that forked all workers."""
    with (
        LocalLauncher() as launcher,
        Supervisor([job(worker_jobs.leaves_a_daemon)], launcher=launcher) as supervisor,
    ):
        supervisor.start()
        pid = until(supervisor, "daemon").fields["pid"]
        assert worker_jobs.alive(pid)
        servers = [server.pid for server in launcher.servers]
    assert gone_within([pid, *servers], scaled(5.0))


def test_a_worker_closes_its_sockets(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONWARNINGS", "default::ResourceWarning")
    lines = []
    jobs = [job(worker_jobs.greet)]
    with LocalLauncher() as launcher, Supervisor(jobs, launcher=launcher, display=lines.append) as supervisor:
        supervisor.start()
        worker_jobs.all_events(supervisor)
    assert lines == ["[actor/0] hello from actor/0"]


def _leftovers(launcher):
    """Open files and threads of this process, and children of it and of the fork server, zombies included."""
    (server,) = launcher.servers
    time.sleep(0.1)  # threads of connections end a moment after their worker
    children = _children(os.getpid()), _children(server.pid)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children


def _children(pid):
    """Processes whose parent it is, zombies included."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            count += int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid
    return count
