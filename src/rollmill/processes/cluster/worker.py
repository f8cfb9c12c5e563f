"""Runs one worker as the job of a Ray actor."""

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
from rollmill.processes.cluster.lines import redirect_output
from rollmill.processes.cluster.modules import NOTHING, SentModules, missing_here, unpack
from rollmill.processes.jobs import Job
from rollmill.processes.worker import serve


class Assignment(NamedTuple):
    """The arguments of a worker, all of them strings or bytes."""

    job: str
    """Its JSON."""
    address: str
    """The supervisor's."""
    token: bytes
    lines: str
    """Address to write to."""
    lines_token: bytes
    folders: str
    """Where the coordinator finds modules. Where these exist on the node too, so does the worker."""
    modules: tuple[Mapping[str, str], bytes] = NOTHING
    """See `SentModules`."""


class Worker:
    """A worker that runs as a Ray actor. Its process does one job and ends."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def work(self, *assignment: Any) -> tuple[int, str]:
        """Does the job of an `Assignment`, and returns the exit code, and why it could not begin."""
        job, address, token, lines, lines_token, folders, modules = Assignment(*assignment)
        leave_signals_to_coordinator()
        sys.path.extend(folder for folder in folders.split(os.pathsep) if folder not in sys.path)
        sent = SentModules(*modules)
        missing = missing_here(sent)
        unpacked = unpack(sent, missing) if missing else None
        # Ray's own processes may be killed before they can do that.
        self._guard = start_guard(os.environ[MARK], folder=str(unpacked.path) if unpacked else "")
        ray = find_ray()
        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        try:
            redirect_output(lines, lines_token, Job.from_json(job), host, node)
            faulthandler.enable()
            return serve(Job.from_json(job), address, token), ""
        except (OSError, Damaged, Refused, UsageError) as error:
            return 1, _unreachable(error, address, host)
        finally:
            if unpacked is not None:
                unpacked.close()  # Ray kills the guard of a process that ends by itself


def _unreachable(error: Any, address: str, host: str) -> str:
    return (
        f"its process on {host} cannot reach the coordinator at {address}: {error}. hint: if other machines "
        "reach the coordinator at another address, set host=ADDRESS"
    )
