"""Starts workers as actors of a Ray cluster."""

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollmill.core.errors import UnfitHost
from rollmill.core.process_tree import MARK, condition_of
from rollmill.processes.cluster.capacity import Demand
from rollmill.processes.cluster.joining import Cluster
from rollmill.processes.cluster.modules import NOTHING, SentModules
from rollmill.processes.cluster.node_health import draining_nodes, selector_without, unreachable_nodes
from rollmill.processes.cluster.output_forwarding import OutputListener, OutputStream
from rollmill.processes.cluster.reservation import NoRoom, RoomReservation
from rollmill.processes.cluster.worker import Assignment, Worker
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Exit

PASSED_ON = ("JAX_", "XLA_")
"""Prefixes of environment variables that affect numerical results, which workers take from the coordinator."""

NOT_PASSED_ON = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
"""Environment variables that a worker takes from its own node, because they describe its devices."""

WAITING_SECONDS = 20.0
"""Seconds between two notices about a worker that has not started."""

FAREWELL_SECONDS = 8.0
"""Seconds to wait for the end of a process that Ray reports as dead. Killing a stopped process takes 5 s."""

CLOSE_SECONDS = 3.0

POLL_SECONDS = 3.0
"""Seconds for which the list of unreachable nodes is reused."""

UNUSUAL_SECONDS = 10.0
"""Seconds after which a worker that has not started may have been placed on an unreachable node."""

MAX_PLACEMENTS = 5
"""Maximum number of actors requested for one worker, if all of them failed before they ran."""

NEVER_RAN = ("never ran", "actor's node")
"""Phrases in the errors of Ray for an actor whose node no longer exists."""


@dataclass(eq=False)
class RayHandle:
    """Handle of a worker that runs as a Ray actor."""

    assignment: Assignment
    stream: OutputStream
    actor: Any = None
    working: Future = field(default_factory=Future)
    """Future of the worker's exit code, or of an error of Ray."""
    ending: Future = field(default_factory=Future)
    """Future that fails once the actor is dead."""
    placements: int = 0
    """Number of actors that have been requested for this worker."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Nodes that were unreachable when the actor was requested."""
    asked_at: float = field(default_factory=time.monotonic)
    waiting_reported: int = 0
    """Number of messages so far that the worker has not started."""
    killed: bool = False
    dead_since: float | None = None
    exit: Exit | None = None


class RayLauncher:
    """A `Launcher` that lets Ray decide on which node a worker runs. A `with` block closes it.

    Ray never restarts a worker, because the supervisor decides about restarts. Workers of groups without a demand
    reserve one core. The resources for all `jobs` are reserved together. If the cluster has room for only some of
    them, it reserves nothing, and the run ends after `ROOM_SECONDS`. Actors are named after the run and the job,
    such as `rollmill-RUN-actor-2`. Workers receive the user's modules if their hosts lack them. `show` is called
    with messages for the user, from any thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        demands: Mapping[str, Demand] | None = None,
        jobs: Sequence[Job] = (),
        run: str = "run",
        modules: SentModules = NOTHING,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._ray = cluster.ray
        self._here = self._ray.util.get_node_ip_address()
        self._demands = demands or {}
        self._run = re.sub(r"[^\w.-]", "-", run)
        self._modules, self._show = modules, show
        self._namespace = f"rollmill-{secrets.token_hex(8)}"
        self._output_listener = OutputListener(cluster.host, self._tell_arrival)
        self._actors = self._ray.remote(Worker)
        self._handles: set[RayHandle] = set()
        self._looked: tuple[float, Mapping[str, str]] = (float("-inf"), {})
        """When it was last seen which nodes are out of reach, and those."""
        self._drained: tuple[float, Mapping[str, float]] = (float("-inf"), {})
        """The same of nodes that are drained."""
        asked = {job.name: self._demand(job) for job in jobs}
        name = f"rollmill-{self._run}"
        self._room = RoomReservation(self._ray, asked, name=name) if asked else None

    def start(self, job: Job, address: str, token: bytes) -> RayHandle:
        """Requests an actor for a job without waiting for it, and returns its handle. A replacement avoids
        unreachable nodes.
        """
        stream = self._output_listener.expect(job)
        assignment = Assignment(
            *(job.to_json(), address, token, self._output_listener.address, self._output_listener.token),
            *(os.pathsep.join(map(os.path.abspath, sys.path)), self._modules),
        )
        handle = RayHandle(assignment, stream)
        self._place(handle, self._unusable_nodes() if job.attempt else {})
        self._handles.add(handle)
        return handle

    def _place(self, handle: RayHandle, without: Mapping[str, str]) -> None:
        job = handle.stream.job
        demand = self._demand(job)
        handle.placements += 1
        handle.without = without
        options = {
            "name": self._name(job, handle.placements),
            "namespace": self._namespace,
            "num_cpus": demand.cpus,
            "num_gpus": demand.gpus,
            "max_restarts": 0,
            **self._where(job, without),
            "runtime_env": {
                "env_vars": _variables_to_pass() | dict(job.environment) | {MARK: secrets.token_hex(8)}
            },
        }
        handle.actor = self._actors.options(**options).remote(job.name)
        handle.working = handle.actor.work.remote(*handle.assignment).future()
        handle.ending = handle.actor.__ray_terminate__.remote().future()

    def _where(self, job: Job, without: Mapping[str, str]) -> dict[str, Any]:
        """Returns the options of an actor: in the reserved room, or on any node that is not in `without`."""
        reserved = self._room and self._room.strategy(job.name, without)
        if reserved:
            return {"scheduling_strategy": reserved}
        return {"scheduling_strategy": "SPREAD", "label_selector": selector_without(without)}

    def output(self, handle: RayHandle) -> int | None:
        """Returns a file descriptor of the worker's output, which the caller reads and closes."""
        return handle.stream.output

    def exit(self, handle: RayHandle) -> Exit | None:
        """Returns how the worker ended, or None while it runs.

        Ray reports a process as dead shortly before it ends, so this also waits for the end of its output.
        """
        if handle.exit is not None:
            return handle.exit
        if not (handle.working.done() and handle.ending.done()):
            return self._look_after_waiting(handle)
        if self._place_again(handle):
            return None
        handle.dead_since = handle.dead_since or time.monotonic()
        if handle.stream.origin is None or time.monotonic() - handle.dead_since > FAREWELL_SECONDS:
            handle.stream.cut()
        if not handle.stream.ended.is_set():
            return None
        self._handles.discard(handle)
        handle.exit = _exit_of(handle.working)
        return handle.exit

    def _place_again(self, handle: RayHandle) -> bool:
        """Places a worker again whose actor Ray sent to a node that was gone, so that it never ran."""
        if handle.killed or handle.stream.origin is not None or handle.placements >= MAX_PLACEMENTS:
            return False
        if not any(words in str(handle.working.exception()) for words in NEVER_RAN):
            return False
        self._place(handle, self._unusable_nodes())
        return True

    def _unusable_nodes(self) -> Mapping[str, str]:
        """Returns the ids of nodes on which no new worker may be placed, because they are unreachable or drained.

        The values are the addresses of unreachable nodes, and "a drained node". The result may be a few seconds
        old.
        """
        looked_at, nodes = self._looked
        if time.monotonic() - looked_at > POLL_SECONDS:
            nodes = unreachable_nodes(self._ray)
            self._looked = (time.monotonic(), nodes)
        return {**nodes, **dict.fromkeys(self._draining(), "a drained node")}

    def _draining(self) -> Mapping[str, float]:
        """Result of `draining_nodes`, which may be a few seconds old."""
        looked_at, nodes = self._drained
        if time.monotonic() - looked_at > POLL_SECONDS:
            nodes = draining_nodes(self._ray)
            self._drained = (time.monotonic(), nodes)
        return nodes

    def leaving(self, handle: RayHandle) -> str:
        """Returns the reason why the worker must leave its node, or an empty string if Ray does not drain the
        node.
        """
        origin = handle.stream.origin
        end = self._draining().get(origin.node) if origin is not None else None
        if end is None:
            return ""
        until = f", until {time.strftime('%H:%M:%S', time.localtime(end))}" if end else ""
        return f"Ray drains its node {origin.host if origin else ''}{until}"

    def kill(self, handle: RayHandle, *, at_once: bool = True) -> None:
        """Kills the worker through Ray (SIGKILL). `at_once` has no effect, because Ray cannot send SIGTERM."""
        handle.killed = True
        self._ray.kill(handle.actor, no_restart=True)

    def abandon(self, handle: RayHandle) -> None:
        """Stops tracking a worker on an unreachable host, because its end would not be noticed.

        The worker ends itself, because its connection to the coordinator is cut as well.
        """
        self.kill(handle)
        handle.exit = handle.exit or Exit(None)
        handle.stream.cut()
        self._handles.discard(handle)

    def condition(self, handle: RayHandle) -> str:
        """Returns the reason why the worker's process cannot run, such as "stopped by a signal". Known only for
        workers on this host.
        """
        origin = handle.stream.origin
        return condition_of(origin.pid) if origin is not None and origin.host == self._here else ""

    def close(self) -> None:
        """Ends all workers that still run, and releases their resources."""
        for handle in self._handles:
            self.kill(handle)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._handles and time.monotonic() < deadline:
            for handle in tuple(self._handles):
                self.exit(handle)
            time.sleep(0.01)
        if self._room is not None:
            self._room.release()
        self._output_listener.close()

    def __enter__(self) -> "RayLauncher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _demand(self, job: Job) -> Demand:
        return self._demands.get(job.group, Demand())

    def _name(self, job: Job, placement: int) -> str:
        """Names an actor. A replacement gets another name, because the previous name may not be free yet."""
        name = f"rollmill-{self._run}-{job.group}-{job.replica}"
        name = f"{name}-again-{job.attempt}" if job.attempt else name
        return f"{name}-placed-{placement}" if placement > 1 else name

    def _tell_arrival(self, stream: OutputStream) -> None:
        assert stream.origin is not None
        self._show(f"{stream.job.name} was placed on {stream.origin.host}")

    def _look_after_waiting(self, handle: RayHandle) -> Exit | None:
        """Reports a worker that has not started, and places it again if the set of unreachable nodes has changed.

        Returns the event that ends the worker if the cluster does not make room for all workers in time.
        """
        waited = time.monotonic() - handle.asked_at
        if handle.stream.origin is not None or waited < UNUSUAL_SECONDS:
            return None
        if self._room is not None and not handle.killed:
            try:
                self._room.check()
            except NoRoom as error:
                self.abandon(handle)
                handle.exit = Exit(None, str(error), error)
                return handle.exit
        without = self._unusable_nodes()
        if handle.without.keys() != without.keys():
            self._ray.kill(handle.actor, no_restart=True)
            self._place(handle, without)
        self._tell_waiting(handle, waited)
        return None

    def _tell_waiting(self, handle: RayHandle, waited: float) -> None:
        if waited < WAITING_SECONDS * (handle.waiting_reported + 1):
            return
        handle.waiting_reported = int(waited / WAITING_SECONDS)
        job, demand = handle.stream.job, self._demand(handle.stream.job)
        if self._room is not None and not self._room.is_made:
            self._show(
                f"{job.name} has not come in {waited:.0f} s: it waits until the cluster has room for all workers, "
                f"{self._room.free()}"
            )
            return
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        kinds = ("CPU", "GPU") if demand.gpus else ("CPU",)
        counts = (f"{free.get(kind, 0.0):g} of {there.get(kind, 0.0):g} {kind}" for kind in kinds)
        self._show(
            f"{job.name} has not started after {waited:.0f} s: it needs {demand}, and the cluster has "
            f"{' and '.join(counts)} free{_beyond(handle.without)}. `ray status` shows more"
        )


def _beyond(without: Mapping[str, str]) -> str:
    return f", while {', '.join(without.values())} cannot be reached" if without else ""


def _variables_to_pass() -> dict[str, str]:
    return {
        name: text for name, text in os.environ.items() if name.startswith(PASSED_ON) and name not in NOT_PASSED_ON
    }


def _exit_of(working: Future) -> Exit:
    """Derives how the process ended from the Ray report on its task."""
    error = working.exception()
    if error is None:
        return Exit(*working.result())
    if failure := failed_start(str(error)):
        return Exit(None, failure, UnfitHost(failure))
    text = [line for line in str(error).splitlines() if line.strip()][-1].strip()
    for start in ("Worker exit detail: ", "The actor is dead because "):
        text = text.rpartition(start)[2]
    text = text.partition(" Some common causes")[0][:500]
    code = re.search(r"exits? with an exit code (\d+)", text)
    return Exit(int(code[1])) if code else Exit(None, f"Ray says: {text}")


def failed_start(text: str) -> str:
    """Returns a Ray error's reason why no worker can start on a host, or an empty string for other errors.

    Such an error does not come from the worker's job, but from its host, where Rollmill is missing or has another
    version.
    """
    raised = re.search(r"^ *Traceback \(most recent call last\)|^ray::\S+\(\) \(pid=", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"\w+(\.\w+)*(Error|Exception)\b", line)]
    if raised is None or not errors:
        return ""
    host = re.search(r"\bip[=:] *([\w.:]+)", text)
    missing = re.search(r"No module named '?([\w.]+)", text)
    where = f"on {host[1]}" if host else "on its host"
    if missing:
        return (
            f"{missing[1]} is not installed {where}: {errors[-1]}. hint: install the driver's packages for the "
            "Python that runs Ray's node"
        )
    return f"the rollmill {where} cannot start, possibly because it is another version: {errors[-1]}"
