"""Runs one worker of a run as the job of a Ray actor."""

import faulthandler
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.errors import Damaged, Refused
from rollmill.core.errors import UsageError
from rollmill.core.interruption import leave_signals_to_coordinator
from rollmill.core.process_tree import MARK, start_guard
from rollmill.processes.cluster.joining import find_ray
from rollmill.processes.cluster.modules import NOTHING, SentModules, missing_here, unpack
from rollmill.processes.cluster.output_forwarding import redirect_output
from rollmill.processes.jobs import Job
from rollmill.processes.worker import serve


class Assignment(NamedTuple):
    """The arguments of a worker that runs as a Ray actor, all of them strings or bytes."""

    job: str
    """The worker's `Job` as JSON."""
    address: str
    """Address of the supervisor."""
    token: bytes
    lines: str
    """Address to which the worker sends its output."""
    lines_token: bytes
    folders: str
    """Folders in which the coordinator finds modules. A worker also uses those that exist on its node."""
    modules: tuple[Mapping[str, str], bytes] = NOTHING
    """The user's modules, see `SentModules`."""


class Worker:
    """Ray actor that runs one worker. Its process does one job and ends."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def work(self, *assignment: Any) -> tuple[int, str]:
        """Does the job of an `Assignment`. Returns the exit code, and the reason if the job could not begin."""
        job, address, token, lines, lines_token, folders, modules = Assignment(*assignment)
        leave_signals_to_coordinator()
        sys.path.extend(folder for folder in folders.split(os.pathsep) if folder not in sys.path)
        sent = SentModules(*modules)
        missing = missing_here(sent)
        unpacked = unpack(sent, missing) if missing else None
        # The guard cleans up if the processes of Ray are killed first.
        self._guard = start_guard(os.environ[MARK], folder=str(unpacked.path) if unpacked else "")
        ray = find_ray()
        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        try:
            redirect_output(lines, lines_token, Job.from_json(job), host, node)
            faulthandler.enable()
            return serve(Job.from_json(job), address, token), ""
        except (OSError, Damaged, Refused, UsageError) as error:
            return 1, (
                f"its process on {host} cannot reach the coordinator at {address}: {error}. hint: if other "
                "machines reach the coordinator at another address, set host=ADDRESS"
            )
        finally:
            if unpacked is not None:
                unpacked.close()  # Ray kills the guard when this process ends normally
