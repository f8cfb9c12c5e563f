"""Starts all child processes: Rollmill's own Python programs, and system programs.

A child can import the same modules as its parent, but no other files of the working directory. It does not inherit
variables that make Python run a file or wait at a prompt.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

PATH = "PYTHONPATH"
AT_A_PROMPT = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT")
"""Environment variables that make Python show a prompt, or run a file before it. Children lack them."""


def python_command(*words: str, isolated: bool = False) -> list[str]:
    """Returns the command that starts a Python child process with the arguments `words`.

    An `isolated` child ignores environment variables and site-packages, so it can import only the standard
    library.
    """
    # `-P`: neither the working directory nor the folder of the program is searched for modules.
    return [sys.executable, *(("-I", "-S") if isolated else ("-P",)), *words]


def python_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables of a Python child process, based on `variables` or on this process's own.

    `PYTHONPATH` keeps the user's entries. Other folders that this process searches, such as the folder of the
    running script, come first, so that the child finds the same modules.
    """
    variables = dict(os.environ if variables is None else variables)
    path = os.pathsep.join([*_own_folders(variables.get(PATH, "")), *filter(None, [variables.get(PATH)])])
    kept = {name: text for name, text in variables.items() if name not in AT_A_PROMPT}
    return kept | {PATH: path} if path else kept


def start_python(
    *words: str, isolated: bool = False, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Starts a Python child process. It has no standard input unless `options` for `subprocess.Popen` set one."""
    return subprocess.Popen(
        python_command(*words, isolated=isolated),
        env=python_environment(variables),
        **{"stdin": subprocess.DEVNULL, **options},
    )


def run_program(*words: str, **options: Any) -> subprocess.CompletedProcess:
    """Runs a system program to its end. It has no standard input unless `options` for `subprocess.run` set one."""
    closed = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    return subprocess.run(words, **{"check": False, **closed, **options})


def _own_folders(given: str) -> list[str]:
    """Returns the folders that this process searches before the default Python path, except those in `given`.

    Later folders come from installed packages, which children find by themselves.
    """
    installed = {os.path.realpath(folder) for folder in sysconfig.get_paths().values()}
    known = {os.path.realpath(entry) for entry in given.split(os.pathsep) if entry} | installed
    first = [*takewhile(lambda entry: not _is_of_python(entry, installed), map(os.path.abspath, sys.path))]
    return list(dict.fromkeys(entry for entry in first if os.path.realpath(entry) not in known))


def _is_of_python(entry: str, installed: set[str]) -> bool:
    """Returns whether a path entry belongs to the standard library or to installed packages."""
    scripts = os.path.realpath(sysconfig.get_path("scripts"))
    return entry.endswith(".zip") or os.path.realpath(entry) in installed - {scripts}
