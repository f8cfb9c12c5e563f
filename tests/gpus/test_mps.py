"""Daemons of MPS: shared, started once, ended after their last user; with a stand-in for the control program."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollmill.gpus.mps import MpsUnavailable, daemon_answers, mps_obstacle, shared_mps
from wordings import raises

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"

HOLD = """
import sys, time
from pathlib import Path
from rollmill.gpus.mps import shared_mps
with shared_mps(sys.argv[1], root=Path(sys.argv[2])) as daemon:
    print(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A folder for daemons, and the stand-in on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    shutil.copy(Path(__file__).parent / "fake_mps.py", programs / "nvidia-cuda-mps-control")
    (programs / "nvidia-cuda-mps-control").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "mps"


def pid_of(daemon) -> int:
    return int(Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"], "control").read_text())


def wait_until(happens):
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_users_share_one_daemon_which_ends_with_its_folder_after_the_last(control):
    with shared_mps(GPU, root=control) as first:
        with shared_mps(GPU, root=control) as second:
            assert first.environment == second.environment and first.ours and first.answers
            assert first.seconds > 0 and second.seconds == 0
            pid = pid_of(first)
        assert first.answers and not is_gone(pid)
    wait_until(lambda: is_gone(pid) and not control.exists())
    assert not daemon_answers(first.environment)
    with shared_mps(GPU, root=control) as third:
        assert pid_of(third) != pid


def test_two_gpus_have_two_daemons(control):
    with shared_mps(GPU, root=control) as first, shared_mps("GPU-ffffffff-0000", root=control) as second:
        assert pid_of(first) != pid_of(second)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
def test_a_killed_user_leaves_no_daemon(control):
    holding = [sys.executable, "-c", HOLD, GPU, str(control)]
    with subprocess.Popen(holding, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        pipes = user.stdout.readline().strip()
        pid = int(Path(pipes, "control").read_text())
        with shared_mps(GPU, root=control) as daemon:
            assert pid_of(daemon) == pid  # which another process has started
            user.kill()
            user.wait()
            time.sleep(0.6)
            assert daemon.answers
    wait_until(lambda: is_gone(pid) and not control.exists())


def test_a_process_that_inherits_the_lock_keeps_the_daemon(control):
    with shared_mps(GPU, root=control) as daemon:
        assert daemon.lock is not None
        heir = subprocess.Popen(["sleep", "600"], pass_fds=[daemon.lock])
    time.sleep(0.6)
    still = daemon.answers
    heir.kill()
    heir.wait()
    assert still
    wait_until(lambda: not control.exists())


def test_a_daemon_that_dies_is_started_again_while_it_is_used(control):
    with shared_mps(GPU, root=control) as daemon:
        pid = pid_of(daemon)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid_of(daemon) != pid and daemon.answers)
    wait_until(lambda: not control.exists())


@pytest.mark.slow
def test_users_that_come_and_go_never_meet_a_daemon_that_ends(control):
    failed = []

    def use():
        for _ in range(4):
            with shared_mps(GPU, root=control) as daemon:
                if not daemon.answers:
                    failed.append(daemon)
            time.sleep(0.25)

    users = [threading.Thread(target=use) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not failed
    wait_until(lambda: not control.exists())


def test_a_daemon_of_somebody_else_is_used_and_left(control, tmp_path, monkeypatch):
    pipes = tmp_path / "foreign"
    pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    named = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    with subprocess.Popen(["nvidia-cuda-mps-control", "-f"]) as foreign:
        try:
            wait_until(lambda: daemon_answers(named))
            with shared_mps(GPU, root=control) as daemon:
                assert not daemon.ours and pid_of(daemon) == foreign.pid
            assert daemon_answers(named) and not control.exists()
        finally:
            foreign.terminate()


def test_a_daemon_that_does_not_start_is_an_error_with_its_last_line(control, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_FAILS", "1")
    with raises("mps-daemon-did-not-start", "no such device"), shared_mps(GPU, root=control):
        pass


def test_without_the_control_program_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-cuda-mps-control" in str(mps_obstacle())
    with pytest.raises(MpsUnavailable, match="is not on the PATH"), shared_mps(GPU, root=tmp_path):
        pass


def test_a_link_in_place_of_the_folder_is_refused(control, tmp_path):
    control.symlink_to(tmp_path)
    with raises("is-no-folder-this-user"), shared_mps(GPU, root=control):
        pass
