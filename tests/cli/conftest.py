"""The command in a process of its own, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command_server import CommandServer

MAX_SECONDS = 300
SMALL = [
    *("--num-envs", "8", "--num-steps", "8", "--num-minibatches", "2", "--update-epochs", "1"),
    *("--network.hidden-sizes", "8"),
]
"""Options of tests that need a training, whichever: its program is compiled once for all of them."""


@pytest.fixture(scope="session")
def environment_variables():
    """As a user's, but for caches of this test run's own, and how fast XLA compiles."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(flags)}


@pytest.fixture(scope="session")
def command_server(environment_variables):
    """Runs commands in processes that have imported Rollmill already."""
    server = CommandServer(environment_variables)
    yield server
    server.close()


@pytest.fixture
def rollmill(environment_variables, command_server, tmp_path):
    """`rollmill("train", "ppo", ...)` waits and returns the finished process; `.start` does not wait.

    A command with options of its own process, such as `env`, begins with the interpreter, as a user's does;
    others are forked from a server, which takes seconds less.
    """

    class Command:
        def start(self, *arguments, **options) -> subprocess.Popen:
            command = [sys.executable, "-m", "rollmill", *map(str, arguments)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            environment = environment_variables | options.pop("env", {})
            return subprocess.Popen(command, cwd=tmp_path, env=environment, **(pipes | options))

        def __call__(self, *arguments, **options) -> subprocess.CompletedProcess:
            if not options:
                return command_server.run([*map(str, arguments)], tmp_path, timeout=MAX_SECONDS)
            process = self.start(*arguments, **options)
            output, errors = process.communicate(timeout=MAX_SECONDS)
            return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    return Command()


def files_under(root: Path) -> dict[str, bytes]:
    """Every file's content, to see whether anything changed."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
