"""Connects to a Ray cluster, or starts a cluster on this machine."""

import contextlib
import importlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.installation import install_command
from rollmill.core.process_tree import MARK, NOBODY, kill_family, start_guard

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100_000_000
"""Size in bytes of the object store of a cluster started on this machine. It only holds jobs."""

ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that makes Ray listen only on loopback, if it is 0 before Ray is imported."""

STARTS = 4
"""Maximum number of attempts to start Ray, if starting takes too long."""

SLOW_SECONDS = 20.0
"""Seconds after which a failed start of Ray is regarded as too slow. Ray gives up on a node after 30 s."""

NICENESS = "RAY_worker_niceness"
"""Environment variable for the scheduling priority of Ray workers. By default, they yield to all other processes
of the machine, and hardly progress while it is busy."""

CONNECT_SECONDS = 5.0
"""Seconds to wait for an answer from the address of a cluster."""

WAYS_OUT = (
    "`ray start --head` makes this machine the first node of a cluster, `ray stop` removes a node that is gone, "
    "and cluster=ray uses this machine alone."
)

TOKEN = (
    "If the cluster asks for a token (as `ray start` does if the file ~/.ray/auth_token exists), this process "
    "needs the same token in ~/.ray/auth_token, and RAY_AUTH_MODE=token in its environment."
)

PATIENT_SECONDS = 5.0
"""Seconds between two notices that a cluster has not accepted this process yet."""

NAMES = ("ray", "auto", "ray://auto")
"""Names that select the Ray cluster to which this machine belongs."""


class StoppedJoining(RollmillError):
    """Error: a signal ended this process while it was connecting to a cluster."""

    exit_code = 128 + signal.SIGTERM


class Cluster(NamedTuple):
    """The Ray cluster to which this process is connected."""

    ray: Any
    """The imported module `ray`."""
    host: str
    """Address of this host, as workers on other hosts reach it."""


def check_cluster(name: str) -> None:
    """Checks the name of a cluster (see `connect_to_ray`) without importing Ray.

    Raises a `UsageError` for an invalid name, or if Ray is not installed.
    """
    if name not in NAMES and ":" not in name:
        raise UsageError(f"cluster={name!r} is not valid, expected ray, auto, ray://HOST:PORT or HOST:PORT.")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            f"placing workers with Ray needs a package that is not installed: {install_command('cluster')}"
        )


def find_ray() -> Any:
    """Imports Ray and returns its module. Raises a `UsageError` if it cannot be imported."""
    try:
        return importlib.import_module("ray")
    except Exception as error:  # a broken installation may raise anything
        raise UsageError(
            f"Ray is installed but cannot be imported: {type(error).__name__}: {error}\n"
            f"hint: {install_command('cluster')} --force-reinstall"
        ) from error


@contextlib.contextmanager
def connect_to_ray(
    name: str, *, workers: int, host: str | None = None, show: Callable[[str], None] = lambda line: None
) -> Iterator[Cluster]:
    """Context manager that connects to a Ray cluster. If the caller is already connected, that connection is used
    and stays open.

    Args:
        name: the cluster. `ray` is the cluster that this machine belongs to, or otherwise a new cluster on this
            machine, which ends with the connection. `auto` is also the cluster that this machine belongs to, but
            never starts one. `HOST:PORT` is the address of a cluster that this machine belongs to, and
            `ray://HOST:PORT` connects through a Ray client server.
        workers: number of workers that a new cluster must have room for.
        host: address of this host, as workers reach it. Default: detected automatically.
        show: called with messages for the user, from any thread.

    Raises:
        UsageError: Ray is not installed, there is no such cluster, or the cluster rejects this process.
    """
    check_cluster(name)
    alone = name == "ray" and not _is_member()
    if alone:
        os.environ.setdefault(ON_LOOPBACK, "0")
    ray = find_ray()
    if ray.is_initialized():
        yield Cluster(ray, host or _reachable_host(ray))
        return
    with _guard() if alone else contextlib.nullcontext("") as mark:
        with _keeping_signals(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "os.fork\\(\\) was called", RuntimeWarning
            )  # safe, because the child calls exec at once
            _start_alone(ray, workers, mark) if alone else _connect(ray, name, show)
        try:
            yield Cluster(ray, host or _reachable_host(ray))
        finally:
            ray.shutdown()


def own_host(ray: Any, coordinator: str) -> str:
    """Returns the address of a worker's node, as other nodes reach it.

    If the coordinator listens on loopback, all workers are on one machine, and the loopback address is returned.
    """
    return LOOPBACK if coordinator == LOOPBACK else ray.util.get_node_ip_address()


def _is_member() -> bool:
    """Returns whether this machine is part of a cluster or the user named one, by the rules of Ray."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address != "local"
    return _current_cluster().exists()


def _current_cluster() -> Path:
    """Returns the file in which Ray notes the address of this machine's cluster."""
    folder = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR")) or "/tmp"
    return Path(folder, "ray", "ray_current_cluster")


@contextlib.contextmanager
def _guard() -> Iterator[str]:
    """Yields a mark. Processes that carry it end with the context, or with this process, however that ends.

    Ray agents would look for their head node for a minute.
    """
    mark = secrets.token_hex(8)
    guard = start_guard(mark, leader=NOBODY)
    try:
        yield mark
    finally:
        kill_family(NOBODY, mark)
        if guard is not None:
            guard.kill()
            guard.wait()


def _start_alone(ray: Any, workers: int, mark: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(NICENESS, "0")
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        _start_patiently(ray, workers, mark)
    except Exception as error:  # Ray raises plain exceptions
        raise UsageError(
            f"cluster=ray: Ray cannot be started on this machine: {str(error).strip() or type(error).__name__}\n"
            "hint: a busy machine may be too slow to start Ray. Try again, or use place=processes."
        ) from error
    finally:
        os.environ.pop(MARK)
        os.environ.update({} if before is None else {MARK: before})


def _start_patiently(ray: Any, workers: int, mark: str) -> None:
    """Starts Ray, and retries once if it exceeds its fixed time limits."""
    for tries_left in reversed(range(STARTS)):
        began = time.monotonic()
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, workers),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
            break
        except Exception:
            if not tries_left or time.monotonic() - began < SLOW_SECONDS:
                raise
            ray.shutdown()
            kill_family(NOBODY, mark)


def _connect(ray: Any, name: str, show: Callable[[str], None]) -> None:
    address = "auto" if name in NAMES else name
    _check_reachable(name, _address_of(name))
    with _telling_delay(name, show):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(f"cluster={name!r} cannot be joined: {lines[0]} {WAYS_OUT} {TOKEN}") from error
    _silence(ray)


def _silence(ray: Any) -> None:
    """Keeps Ray from printing its own view of ended workers, which it does whatever it is asked to log."""
    with contextlib.suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None


@contextlib.contextmanager
def _telling_delay(name: str, show: Callable[[str], None]) -> Iterator[None]:
    """Says so meanwhile, if it takes long: Ray itself tries for a minute without a word."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(PATIENT_SECONDS):
            show(
                f"cluster={name!r} did not accept this process within {time.monotonic() - began:.0f} s. This "
                f"machine must be one of its nodes: run `ray start --address=HOST:PORT` on it. {TOKEN}"
            )

    thread = threading.Thread(target=tell, name="rollmill-joining", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _address_of(name: str) -> str | None:
    """Returns HOST:PORT of a cluster by the rules of Ray, or None if only Ray can tell."""
    if name not in NAMES:
        return name.removeprefix("ray://")
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address in ("auto", "local") else address.removeprefix("ray://")
    with contextlib.suppress(OSError):
        return _current_cluster().read_text().strip()
    return None


def _check_reachable(name: str, address: str | None) -> None:
    """Raises a `UsageError` if nothing listens at this address, because Ray would silently retry for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            pass
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cluster={name!r} cannot be joined: there is no answer at {address} ({error}). {WAYS_OUT}"
        ) from error


def _reachable_host(ray: Any) -> str:
    """Returns loopback if all nodes are this machine, or else its address in Ray."""
    own = ray.util.get_node_ip_address()
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if nodes <= {own} else own


@contextlib.contextmanager
def _keeping_signals() -> Iterator[None]:
    """Raises `StoppedJoining` after a SIGTERM, which this process's own handler gets too.

    Ray takes SIGTERM to itself when it is joined, and would end this process without a last checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # the SIGTERM handler of Ray exits with code 1
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise StoppedJoining(
            "SIGTERM arrived while this process was joining Ray, before training began."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
