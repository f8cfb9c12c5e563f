"""The process that owns an MPS daemon: `python -I -S mps_owner.py FOLDER GPU`. It imports nothing of Rollmill.

The process starts the daemon of one GPU, and ends it once no process holds the shared lock on `FOLDER/users`. The
kernel releases the lock of a process however the process ends, so the daemon does not outlive its last user.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
USERS, PIPES, LOGS, FAILED = "users", "pipe", "log", "failed"
POLL_SECONDS = 0.2
QUIT_SECONDS = 10.0
MAX_LOSSES = 3
"""Maximum number of times that a daemon which died is started again for its remaining users."""
PR_SET_PDEATHSIG = 1


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment variables with which clients and control commands find the daemon in a folder."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / PIPES),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / LOGS),
    }


def own(folder: Path, gpu: str) -> None:
    """Runs the MPS daemon of a GPU until no process uses it. Creates `FOLDER/failed` if it keeps failing."""
    for name in (PIPES, LOGS):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | environment_of(folder) | {"CUDA_VISIBLE_DEVICES": gpu}
    environment.pop("LD_PRELOAD", None)  # it belongs to the user's programs
    daemon, losses = _start(environment), 0
    with (folder / USERS).open("rb") as users:
        while not _is_unused(users.fileno()):
            if daemon.poll() is not None:
                losses += 1
                if losses > MAX_LOSSES:
                    (folder / FAILED).touch()
                    return
                daemon = _start(environment)
            time.sleep(POLL_SECONDS)
        # This process holds the exclusive lock now, so nobody uses the daemon, or can join it before the folder is
        # gone.
        _quit(daemon, environment)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # fails if the folder contains daemons of other GPUs
            folder.parent.rmdir()


def _start(environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [CONTROL, "-f"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_owner,
    )


def _is_unused(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _quit(daemon: subprocess.Popen, environment: dict[str, str]) -> None:
    """Ends the daemon and its server: by its control, or else by signals."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([CONTROL], input=b"quit\n", env=environment, capture_output=True, timeout=QUIT_SECONDS)
    for end in (daemon.terminate, daemon.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(QUIT_SECONDS)
            return
        end()
    daemon.wait()


def _end_with_owner() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    if os.fork() == 0:  # becomes independent of the process that starts it, which may end or kill its children
        own(Path(sys.argv[1]), sys.argv[2])
