"""Runs MPS daemons, one per GPU, which all runs of a user share.

Clients of two daemons take turns on a GPU, and only clients of the same daemon overlap. Each process that uses a
daemon holds a shared lock on a file in the daemon's folder. An owner process (`mps_owner`) ends the daemon when
the last lock is released. A daemon started by another user or program is used, but never stopped.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmill.core.child_processes import run_program, start_python
from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.process_tree import MARK
from rollmill.gpus import mps_owner

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"
"""Folder in which CUDA looks for an MPS daemon by default."""
START_SECONDS, ANSWER_SECONDS, POLL_SECONDS = 30.0, 5.0, 0.05
STARTING = "starting"


class MpsUnavailable(RollmillError):
    """Raised if no MPS daemon is running and none can be started."""

    exit_code = 2


@dataclass(frozen=True)
class MpsDaemon:
    """A running MPS daemon of one GPU."""

    environment: Mapping[str, str]
    """Environment variables with which a process becomes a client of the daemon."""
    ours: bool
    """True if Rollmill started the daemon, and ends it after its last user."""
    seconds: float = 0.0
    """Seconds that it took to start the daemon, or 0 if it was already running."""
    lock: int | None = None
    """File descriptor of the lock that users of the daemon hold. A process that inherits it also counts as
    a user.
    """

    @property
    def answers(self) -> bool:
        """True if the daemon is running and answers requests."""
        return daemon_answers(self.environment)


def mps_obstacle() -> str | None:
    """Returns the reason why MPS cannot be used here, or None if it can."""
    if not sys.platform.startswith("linux"):
        return "MPS is available only on Linux"
    if shutil.which(mps_owner.CONTROL) is None:
        return f"the program {mps_owner.CONTROL}, which comes with the driver, is not on the PATH"
    return None


def daemon_answers(environment: Mapping[str, str]) -> bool:
    """Returns whether the MPS daemon that these environment variables select answers requests."""
    pipes = Path(environment.get(PIPE_DIRECTORY, DEFAULT_PIPES))
    if not (pipes / "control").exists():
        return False
    settings = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"} | dict(environment)
    try:
        asked = run_program(
            mps_owner.CONTROL,
            input=b"get_server_list\n",
            env=settings,
            capture_output=True,
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and b"Cannot" not in asked.stdout + asked.stderr


@contextlib.contextmanager
def shared_mps(gpu: str, *, root: Path | None = None) -> Iterator[MpsDaemon]:
    """Context manager that uses the MPS daemon of a GPU, given by UUID. Starts a daemon if none is running.

    `root` is the folder of all daemons, by default this user's folder among the temporary files. Raises
    `MpsUnavailable` with the reason if no daemon can be started.
    """
    if (reason := mps_obstacle()) is not None:
        raise MpsUnavailable(f"{reason}.")
    if (foreign := _foreign_daemon()) is not None:
        yield foreign
        return
    folder = (root or _root()) / gpu.removeprefix("GPU-")[:8]
    began = time.monotonic()
    with _in_use(folder) as lock:
        running, started = _join(folder, gpu)
        seconds = time.monotonic() - began if started else 0.0
        yield MpsDaemon(running, ours=True, seconds=seconds, lock=lock)


def _foreign_daemon() -> MpsDaemon | None:
    """Returns a daemon that another user or program has started in the folder in which CUDA looks for it."""
    named = {name: os.environ[name] for name in (PIPE_DIRECTORY,) if name in os.environ}
    return MpsDaemon(named, ours=False) if daemon_answers(named) else None


def _root() -> Path:
    """Returns this user's folder of daemons. Its path is short, as names of sockets have to be."""
    return Path(tempfile.gettempdir()) / f"rollmill-mps-{os.getuid()}"


@contextlib.contextmanager
def _in_use(folder: Path) -> Iterator[int]:
    """Holds the shared lock of a daemon's folder, and yields its descriptor."""
    deadline = time.monotonic() + START_SECONDS
    while (lock := _lock(folder)) is None:
        if time.monotonic() > deadline:
            raise MpsUnavailable(f"an MPS daemon in {folder} did not end within {START_SECONDS:.0f} s.")
        time.sleep(POLL_SECONDS)
    try:
        yield lock
    finally:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Takes the shared lock and returns its descriptor, or None while an earlier daemon is being ended."""
    try:
        _make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        lock = os.open(folder / mps_owner.USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # another process has removed it in the meantime
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder / mps_owner.USERS)):
            return lock
    except OSError:  # its owner holds the exclusive lock, or has removed the file
        pass
    os.close(lock)
    return None


def _make_private(root: Path) -> None:
    """Creates this user's folder. Raises a `UsageError` if it belongs to another user, or is a link."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise UsageError(f"{root} is not a folder of this user. hint: remove it, or set TMPDIR to another folder.")


def _join(folder: Path, gpu: str) -> tuple[Mapping[str, str], bool]:
    """Returns the variables of a folder's daemon, and whether this process started it just now."""
    environment = mps_owner.environment_of(folder)
    with (folder / STARTING).open("wb") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if daemon_answers(environment):
            return environment, False
        failed = folder / mps_owner.FAILED
        failed.unlink(missing_ok=True)
        owner = start_python(
            *(mps_owner.__file__, str(folder), gpu),
            isolated=True,
            # the daemon outlives workers, so it must not have their mark
            variables={name: text for name, text in os.environ.items() if name != MARK},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if owner.wait():
            raise MpsUnavailable(
                f"the process of the MPS daemon of {gpu} ended with exit code {owner.returncode}."
            )
        deadline = time.monotonic() + START_SECONDS
        while not daemon_answers(environment):
            if failed.exists() or time.monotonic() > deadline:
                raise MpsUnavailable(f"the MPS daemon of {gpu} did not start: {_last_line(folder)}")
            time.sleep(POLL_SECONDS)
        return environment, True


def _last_line(folder: Path) -> str:
    log = folder / mps_owner.LOGS / "control.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it wrote no log."
