"""The entry point of a worker process, fresh or forked.

A fresh process receives its job as one JSON object on standard input. It is not passed as arguments, which every
user of the host can read.
"""

import contextlib
import faulthandler
import io
import json
import os
import sys
from typing import Any

from rollmill.core.interruption import leave_signals_to_coordinator
from rollmill.core.process_tree import name_process
from rollmill.processes.jobs import Job
from rollmill.processes.worker import serve


def main() -> None:
    """Reads a worker's assignment from standard input and runs it."""
    assignment = json.load(sys.stdin)
    close_input()
    sys.exit(run_as_worker(assignment))


def run_as_worker(assignment: dict[str, Any]) -> int:
    """Does the job of a worker in this process, and returns the exit code.

    The assignment contains `job` (as JSON), `address`, `token` (in hexadecimal), `environment` (all variables),
    `path` (`sys.path`) and `folder` (the working directory).
    """
    leave_signals_to_coordinator()
    take_environment(assignment["environment"])
    sys.path[:] = assignment["path"]
    sys.argv[1:] = []
    os.chdir(assignment["folder"])
    faulthandler.enable()
    write_by_lines()
    job = Job.from_json(assignment["job"])
    name_process(job.name)
    return serve(job, assignment["address"], bytes.fromhex(assignment["token"]))


def take_environment(environment: dict[str, str]) -> None:
    """Replaces all environment variables of this process by the given ones."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def write_by_lines() -> None:
    """Makes standard output line-buffered even without a terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def close_input() -> None:
    """Replaces the standard input of this process by an empty one."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with contextlib.suppress(OSError):
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
