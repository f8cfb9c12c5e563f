"""Trials that share a GPU by MPS, killed in all ways; on machines with a GPU and the control program of MPS."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollmill.gpus.activity import ActivityMonitor
from rollmill.gpus.devices import find_gpus, open_nvml
from rollmill.gpus.mps import daemon_answers, mps_obstacle, shared_mps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/dev/nvidiactl").exists() or mps_obstacle() is not None, reason="needs a GPU with MPS"
    ),
]

SIZES = ["--num-envs", "64", "--num-steps", "64", "--fusion", "off", "--checkpoint-seconds", "0.5"]
ENDLESS = ["ppo", "CartPole-v1", *SIZES, "--total-timesteps", str(64 * 64 * 10**6)]
SHORT = ["ppo", "CartPole-v1", *SIZES, "--total-timesteps", str(64 * 64 * 300)]


def sweep(*words):
    return [sys.executable, "-m", "rollmill", "sweep", *map(str, words)]


def daemons() -> list[str]:
    """Processes of MPS, its owners included, and folders of pipes that are left."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    running = [line for line in listed if "nvidia-cuda-mps" in line or "mps_owner" in line]
    return running + [str(path) for path in Path(tempfile.gettempdir()).glob(f"rollmill-mps-{os.getuid()}/*")]


def wait_until(happens, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))


def processes_of(run: Path) -> list[int]:
    """The processes that train a run, by the log that they write."""
    found, log = [], str(run.with_suffix(".log"))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "fd" / "1") == log:
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def gpu():
    with open_nvml() as nvml:
        return find_gpus(nvml)[0]


def test_users_share_one_daemon_which_ends_after_the_last(gpu):
    with shared_mps(gpu.uuid) as first, shared_mps(gpu.uuid) as second:
        assert first.ours and second.ours and first.environment == second.environment
        assert first.seconds > 0 and second.seconds == 0 and first.answers
        print(f"daemon started in {first.seconds:.2f} s")
        environment = dict(first.environment)
    wait_until(lambda: not daemons(), 30)
    assert not daemon_answers(environment)


def test_a_daemon_of_somebody_else_is_used_and_left(gpu, monkeypatch, tmp_path):
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "p"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "l")}
    for folder in pipes.values():
        Path(folder).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | pipes, check=True)
    try:
        for name, text in pipes.items():
            monkeypatch.setenv(name, text)
        with shared_mps(gpu.uuid) as daemon:
            assert not daemon.ours and daemon.answers
        done = subprocess.run(sweep(*SHORT, "--over", "seed=0..1", "--sweep-dir", tmp_path / "sweep"))
        assert done.returncode == 0 and daemon_answers(pipes)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=os.environ | pipes, check=False)


def test_one_trial_of_four_is_killed_and_then_the_sweep(gpu, tmp_path):
    folder = tmp_path / "sweep"
    runs = [folder / "trials" / name for name in "0123"]
    words = [*ENDLESS, "--over", "seed=0..3", "--sweep-dir", folder, "--gpu-sharing", "mps", "--at-once", "4"]
    running = subprocess.Popen(sweep(*words), stdout=subprocess.PIPE, text=True)
    wait_until(lambda: all(len(checkpoints(run)) > 1 for run in runs), 200)
    (killed,), before = processes_of(runs[0]), [checkpoints(run)[-1] for run in runs]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: processes_of(runs[0]) not in ([], [killed]))
    wait_until(lambda: all(checkpoints(run)[-1] > last for run, last in zip(runs, before, strict=True)), 200)
    running.kill()
    printed = running.communicate()[0]
    print(printed)
    assert "was ended by SIGKILL. It is being resumed" in printed
    wait_until(lambda: not any(map(processes_of, runs)), 60)
    wait_until(lambda: not daemons(), 30)
    assert all(json.loads((run / "summary.json").read_text())["status"] == "stopped" for run in runs)
    before = [checkpoints(run)[-1] for run in runs]
    again = subprocess.Popen(sweep("--resume", folder), stdout=subprocess.DEVNULL)
    wait_until(lambda: all(checkpoints(run)[-1] > last for run, last in zip(runs, before, strict=True)), 200)
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=60) == 143
    wait_until(lambda: not daemons(), 30)


def test_a_dead_daemon_is_started_again_for_its_users(gpu):
    with shared_mps(gpu.uuid) as daemon:
        (line,) = [line for line in daemons() if "nvidia-cuda-mps-control" in line and "-f" in line]
        os.kill(int(line.split()[0]), signal.SIGKILL)
        wait_until(lambda: line not in daemons() and daemon.answers, 30)
    wait_until(lambda: not daemons(), 30)


def test_activity_is_read(gpu):
    with open_nvml() as nvml, ActivityMonitor(nvml, gpu.index) as monitor:
        time.sleep(1.5)
        activity = monitor.read()
    print(activity)
    assert activity.utilisation is not None and 0 <= activity.utilisation <= 1
    assert activity.sm_activity is None or 0 <= activity.sm_activity <= 1
