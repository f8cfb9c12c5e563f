"""Asks git about a repository, without running programs that the repository configures.

The configuration of a repository can name programs: file filters, monitors, hooks and transports. The working
directory may belong to a stranger, so all of them are disabled.
"""

import os
import subprocess
from pathlib import Path

from rollmill.core.child_processes import run_program

SECONDS = 10
PLAIN = (
    "--no-optional-locks",  # otherwise git may write its index, and then run a hook
    *("-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
)
NO_TRANSPORT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
"""Environment variables that keep git from fetching missing objects, which could run a program."""

COMPARE = ("diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD", "--")


def commit_of(folder: Path | None = None) -> str | None:
    """Returns the commit of the repository around a folder, with `-dirty` if tracked files differ.

    The result is None outside a repository, without a commit, or if git is not installed.
    """
    commit = _output(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    compared = _git(folder, *_without_filters(folder), *COMPARE)
    codes = {0: commit, 1: f"{commit}-dirty"}
    return None if compared is None else codes.get(compared.returncode)


def is_tracked(file: Path) -> bool:
    """Returns whether git tracks a file in the repository of its folder."""
    return _output(file.parent, "ls-files", "--error-unmatch", file.name) is not None


def _without_filters(folder: Path | None) -> list[str]:
    """Returns the git options that turn off the filters named by the repository itself."""
    named = _output(folder, "config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\.") or ""
    filters = dict.fromkeys(name.rpartition(".")[0] for name in named.splitlines())
    settings = ("clean=", "process=", "required=false")
    return [word for name in filters for setting in settings for word in ("-c", f"{name}.{setting}")]


def _output(folder: Path | None, *arguments: str) -> str | None:
    """Runs git and returns its output, or None if it fails or prints nothing."""
    completed = _git(folder, *arguments)
    return None if completed is None or completed.returncode else completed.stdout.strip() or None


def _git(folder: Path | None, *arguments: str) -> subprocess.CompletedProcess | None:
    try:
        return run_program(
            *("git", *PLAIN, *arguments),
            cwd=folder,
            env=os.environ | NO_TRANSPORT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
