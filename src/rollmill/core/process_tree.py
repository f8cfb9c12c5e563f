"""Makes sure that processes do not outlive their owner.

A worker leads its own session, and has a mark in its environment variables. Its children inherit both, so they can
be found and ended after the worker, even in another session.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MARK = "ROLLMILL_WORKER"
"""Environment variable that identifies a worker and the processes that it starts."""

ON_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FAMILY_SECONDS = 1.0
LATE_LOOKS, LOOK_SECONDS = 10, 0.2
"""Number of times a guard searches again for processes to kill, and the pause in seconds. A process has no mark
while it begins to execute a program, which may take long on a busy machine."""

NOBODY = -1
"""Process id that stands for a missing session leader."""


def lead_session() -> None:
    """Makes this process a session leader, so that the terminal's signals do not reach it."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def die_with(parent: int) -> None:
    """Ends this process when its parent dies.

    It sets PR_SET_PDEATHSIG to SIGKILL on Linux, and exits if the parent is already gone.
    """
    end_with_parent(parent, signal.SIGKILL)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Signals this process when the thread that forked it ends.

    It sets PR_SET_PDEATHSIG on Linux, and exits if the parent is already gone.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose own parent dies (a subreaper)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Sets the process name that `ps` and `top` show, truncated to 15 bytes."""
    if ON_LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name[:15])


def kill_family(leader: int, mark: str) -> None:
    """Kills the marked processes that a worker started, but not the worker. Waits up to a second.

    `leader` is the worker's process id and session, or `NOBODY`. The worker need not exist any more.
    """
    if not ON_LINUX:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
        return
    deadline = time.monotonic() + FAMILY_SECONDS
    while members := list(_family(leader, mark)):
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def kill_children() -> None:
    """Kills and reaps all children of this process, and orphans it adopts, for up to two seconds."""
    deadline = time.monotonic() + 2 * FAMILY_SECONDS
    while time.monotonic() < deadline:
        for pid in _children_of(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


def start_guard(mark: str, *, leader: int | None = None, folder: str = "") -> subprocess.Popen | None:
    """Starts a guard process, which kills the processes that this process leaves behind when it ends.

    The guard kills the processes with `mark`, or those in the session of the process `leader`. It protects workers
    whose parent cannot kill them or dies at the same time. It also deletes `folder`, if given. Returns None if the
    system cannot watch a process.
    """
    # This file is also the guard's program, so it must not import other modules of the package at the top.
    from rollmill.core.child_processes import start_python

    try:
        watched = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return None
    try:
        return start_python(
            *(__file__, str(watched), str(os.getpid() if leader is None else leader), mark, folder),
            isolated=True,
            pass_fds=[watched],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(watched)


def guard(watched: int, leader: int, mark: str, folder: str) -> None:
    """Waits until the process behind the descriptor `watched` ends, and kills the processes that it left behind.

    Then deletes the folder `folder`, unless the string is empty.
    """
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    kill_family(leader, mark)
    for _ in range(LATE_LOOKS):
        time.sleep(LOOK_SECONDS)
        kill_family(leader, mark)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def end_leader(pid: int) -> None:
    """Kills a worker whose parent is dead, if the kernel has not done so, and waits up to a second for its end."""
    deadline = time.monotonic() + FAMILY_SECONDS
    while _is_leader(pid) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


class ProcessIdentity(NamedTuple):
    """Identifies a process, so that it is not confused with a later process of the same id."""

    pid: int
    start_time: str


def descendants_of(pid: int) -> list[ProcessIdentity]:
    """Returns a process and all of its descendants. The result is empty if the system has no /proc."""
    if not ON_LINUX:
        return []
    children: dict[int, list[ProcessIdentity]] = {}
    found: list[ProcessIdentity] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        if fields := _stat_fields(int(name)):
            identity = ProcessIdentity(int(name), fields[19])
            children.setdefault(int(fields[1]), []).append(identity)
            found += [identity] if int(name) == pid else []
    for parent in found:  # the list grows during the loop
        found += children.get(parent.pid, [])
    return found


def kill_all(identities: Iterable[ProcessIdentity]) -> None:
    """Kills the given processes, except for those that have already ended."""
    for pid, start_time in identities:
        fields = _stat_fields(pid)
        if fields and fields[19] == start_time:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def resident_memory(identities: Iterable[ProcessIdentity]) -> int:
    """Returns how many bytes of memory the given processes use, or 0 if unknown.

    Shared pages are divided among the processes that use them.
    """
    total = 0
    for pid, _ in identities:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return 1024 * total


def condition_of(pid: int) -> str:
    """Returns the reason why a process cannot run, or an empty string if it can."""
    state, _ = _read_stat(pid)
    names = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead"}
    return names.get(state, "")


def count_threads() -> int:
    """Returns how many native threads this process has, or 0 if unknown."""
    return len(os.listdir("/proc/self/task")) if ON_LINUX else 0


def _family(leader: int, mark: str) -> Iterator[int]:
    entry = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (leader, os.getpid()):
            continue
        state, session = _read_stat(int(name))
        if state not in ("", "Z", "X") and (session == leader or entry in _read_environment(int(name))):
            yield int(name)


def _children_of(parent: int) -> Iterator[int]:
    if not ON_LINUX:
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat_fields(int(name))
        if fields and int(fields[1]) == parent:
            yield int(name)


def _is_leader(pid: int) -> bool:
    """Returns whether a process exists and leads its session, as workers do."""
    if ON_LINUX:
        state, session = _read_stat(pid)
        return session == pid and state not in ("Z", "X")
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def _read_stat(pid: int) -> tuple[str, int]:
    """Returns state and session, or an empty string and 0 if the process does not exist."""
    fields = _stat_fields(pid)
    return (fields[0], int(fields[3])) if fields else ("", 0)


def _stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, or none if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _read_environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    if ON_LINUX:
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    guard(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
