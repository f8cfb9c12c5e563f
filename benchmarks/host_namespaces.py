"""Hosts made of namespaces of one Linux machine: network, mounts, processes, name and clock of their own.

A host has an address, /tmp and /dev/shm of its own; the rest of the file system is that of the machine. Needs
root, `ip`, `unshare` and `nsenter`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NETWORK, PORT, NODE_BYTES = "10.77.0", 6379, 80_000_000
SWITCH = (sys.executable, str(Path(__file__).with_name("slow_link.py")))
TOOLS = ("ip", "unshare", "nsenter")

SCRIPT = """
import os, subprocess, sys, time
for folder in ("/tmp", "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
subprocess.run(["hostname", sys.argv[1]], check=True)
print("up", flush=True)
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.2)
"""
"""The first process of a host, which reaps orphans."""


class NoNamespaces(Exception):
    """Hosts cannot be made here; the message says why."""


@dataclass
class Host:
    """One host."""

    number: int
    monotonic_offset: int
    """Seconds by which its monotonic clock is ahead."""
    prefix: str
    pid: int = 0
    mounts: Sequence[tuple[Path, Path]] = ()
    """Folders that it sees in the place of others."""
    process: subprocess.Popen | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.prefix}-{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, *words: object) -> list[str]:
        """Returns the command line that runs a command on this host."""
        entering = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "-T"]
        return [*entering, "--wd=" + os.getcwd(), "--", *map(str, words)]

    def run(self, *words: object, check: bool = True, **options: object) -> subprocess.CompletedProcess:
        """Runs a command on this host to its end."""
        return subprocess.run(
            self.command(*words),
            check=check,
            env=os.environ | self.environment,
            text=True,
            capture_output=True,
            **options,
        )

    def start(self, *words: object, **options: object) -> subprocess.Popen:
        """Starts a command on this host."""
        return subprocess.Popen(self.command(*words), env=os.environ | self.environment, text=True, **options)

    def up(self) -> None:
        """Starts it: its first process, its mounts and its link."""
        clock = ["--time", "--monotonic", str(self.monotonic_offset), "--boottime", str(self.monotonic_offset)]
        command = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--mount", "--uts", "--pid", "--fork"]
        command += ["--mount-proc", *clock, "--kill-child", "python3", "-c", SCRIPT, self.name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None or self.process.stdout.readline() != "up\n":
            raise NoNamespaces(f"host {self.name} did not start")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.pid = int(children[0])
        for source, target in self.mounts:
            self.run("mount", "--bind", source, target)
        self.link(True)

    def link(self, up: bool) -> None:
        """Cuts its link, or mends it."""
        link = ["ip", "-n", f"{self.prefix}-sw", "link", "set", f"p{self.number}"]
        subprocess.run([*link, "up" if up else "down"], check=True)

    def kill(self) -> None:
        """Ends it and all of its processes, as a failure of power does."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


class SlowLink(NamedTuple):
    """A link of each host that takes time. Frames between two hosts are late by `delay_ms`."""

    delay_ms: float
    mbit: float
    """Megabits a second."""


@contextlib.contextmanager
def hosts(
    count: int,
    *,
    offsets: Mapping[int, int] | None = None,
    prefix: str = "rmh",
    slow: SlowLink | None = None,
) -> Iterator[list[Host]]:
    """Makes hosts on one network, numbered from 1, which end with the context.

    `offsets` are seconds by which the monotonic clock of a host is ahead of this machine's. With a `slow` link,
    the process of slow_link.py is between them in place of a bridge.
    """
    check_namespaces()
    made = [Host(number, (offsets or {}).get(number, 0), prefix) for number in range(1, count + 1)]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, made, prefix)
        _make_network(made, prefix, bridged=slow is None)
        if slow is not None:
            stack.enter_context(_forwarding(made, prefix, slow))
        for host in made:
            host.up()
        yield made


def _remove(made: Sequence[Host], prefix: str) -> None:
    for host in made:
        host.kill()
    for name in (*(host.name for host in made), f"{prefix}-sw"):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def _forwarding(made: Sequence[Host], prefix: str, slow: SlowLink) -> Iterator[None]:
    for host in made:
        subprocess.run(["ip", "netns", "exec", host.name, *SWITCH, "eth0", "--checksums"], check=True)
    ports = [f"p{host.number}" for host in made]
    words = [*ports, "--delay-ms", str(slow.delay_ms), "--mbit", str(slow.mbit)]
    command = ["ip", "netns", "exec", f"{prefix}-sw", *SWITCH, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "forwards\n":
            raise NoNamespaces("the slow link between the hosts did not start")
        yield
    finally:
        process.kill()
        process.wait()


def check_namespaces() -> None:
    """Raises `NoNamespaces` if hosts cannot be made here."""
    if os.geteuid() != 0:
        raise NoNamespaces("namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoNamespaces(f"{', '.join(missing)} is missing")
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--time", "--monotonic", "5", "--fork", "true"]
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    if tried.returncode:
        raise NoNamespaces(tried.stderr.strip())


def _make_network(made: Sequence[Host], prefix: str, *, bridged: bool) -> None:
    switch = f"{prefix}-sw"
    lines = [["netns", "add", switch]]
    if bridged:
        lines += [
            ["-n", switch, "link", "add", "br0", "type", "bridge"],
            ["-n", switch, "link", "set", "br0", "up"],
        ]
    for host in made:
        ours, theirs = "eth0", f"p{host.number}"
        lines += [
            ["netns", "add", host.name],
            ["-n", switch, "link", "add", theirs, "type", "veth", "peer", "name", ours, "netns", host.name],
            ["-n", switch, "link", "set", theirs, *(["master", "br0"] if bridged else []), "up"],
            ["-n", host.name, "addr", "add", f"{host.address}/24", "dev", ours],
            ["-n", host.name, "link", "set", ours, "up"],
            ["-n", host.name, "link", "set", "lo", "up"],
        ]
    for line in lines:
        done = subprocess.run(["ip", *line], check=False, capture_output=True, text=True)
        if done.returncode:
            raise NoNamespaces(f"ip {' '.join(line)}: {done.stderr.strip()}")


def start_ray(python: str, head: Host, host: Host, *, cpus: int = 4) -> None:
    """Makes a host with room for `cpus` workers a node of the Ray cluster of `head`, or that head itself."""
    where = ["--head", f"--port={PORT}"] if host is head else [f"--address={head.address}:{PORT}"]
    words = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}", f"--object-store-memory={NODE_BYTES}"]
    quiet = ["--disable-usage-stats", *(["--include-dashboard=false"] if host is head else [])]
    host.run(python, "-m", "ray.scripts.scripts", "start", *where, *words, *quiet)
