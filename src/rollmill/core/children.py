"""The one door for child processes: Python programs of Rollmill's own, and programs of the system.

A child imports what its parent can import, and nothing that merely lies in the working directory. It gets no
variable that makes Python run a file or wait at a prompt.
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
"""Variables by which Python runs a file before a prompt, or shows a prompt; children have none."""


def python_command(*words: str, isolated: bool = False) -> list[str]:
    """The command of a Python child.

    Args:
        *words: arguments of Python, such as `-m` and the name of a module.
        isolated: for a program that imports the standard library alone: variables and site-packages are ignored.
    """
    # `-P`: neither the working directory nor the folder of the program is searched for modules.
    return [sys.executable, *(("-I", "-S") if isolated else ("-P",)), *words]


def python_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a Python child.

    `PYTHONPATH` keeps the entries that the user gave. Before them come the folders that this process searches
    besides, such as that of the script that runs: the child finds the modules that this process finds.

    Args:
        variables: variables to start from; this process's own if left out.
    """
    variables = dict(os.environ if variables is None else variables)
    path = os.pathsep.join([*_own_folders(variables.get(PATH, "")), *filter(None, [variables.get(PATH)])])
    kept = {name: text for name, text in variables.items() if name not in AT_A_PROMPT}
    return kept | {PATH: path} if path else kept


def start_python(
    *words: str, isolated: bool = False, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Starts a Python child, without standard input unless it is given one.

    Args:
        *words: arguments of Python, such as `-m` and the name of a module.
        isolated: for a program that imports the standard library alone.
        variables: its variables; this process's own if left out.
        **options: further arguments of `subprocess.Popen`.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        python_command(*words, isolated=isolated),
        env=python_environment(variables),
        **{"stdin": subprocess.DEVNULL, **options},
    )


def run_program(*words: str, **options: Any) -> subprocess.CompletedProcess:
    """Runs a program of the system to its end, without standard input unless it is given one.

    Args:
        *words: its name, and its arguments.
        **options: further arguments of `subprocess.run`.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    closed = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    return subprocess.run(words, **{"check": False, **closed, **options})


def _own_folders(given: str) -> list[str]:
    """The folders in which this process looks for modules before it looks in Python's own, beyond those given.

    Folders after those come from packages that are installed, whose children find them by themselves.
    """
    installed = {os.path.realpath(folder) for folder in sysconfig.get_paths().values()}
    known = {os.path.realpath(entry) for entry in given.split(os.pathsep) if entry} | installed
    first = [*takewhile(lambda entry: not _is_of_python(entry, installed), map(os.path.abspath, sys.path))]
    return list(dict.fromkeys(entry for entry in first if os.path.realpath(entry) not in known))


def _is_of_python(entry: str, installed: set[str]) -> bool:
    """True for a folder of the standard library or of packages, and for the library's archive."""
    scripts = os.path.realpath(sysconfig.get_path("scripts"))
    return entry.endswith(".zip") or os.path.realpath(entry) in installed - {scripts}
