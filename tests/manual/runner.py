"""Runs pages: `python -m manual.runner` reads a request a line, and answers with a result a line, as JSON.

A page is run in its own folder, in processes that are forked from this one, so that Rollmill is imported once for
all pages: a process for each command, and one for the page's program in Python. JAX has no threads by then.
"""

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from manual.snippets import ROOT, Snippet, commands_of, snippets_of

MAX_SECONDS = 400
FORK = multiprocessing.get_context("fork")
PRELOADED = (
    *("train", "evaluate", "resume", "export", "sweep", "plan", "listing"),
    *("play", "explain", "doctor", "profile", "serve"),
)


def main() -> None:
    """Answers requests until the input ends."""
    import importlib

    for name in ("gymnasium", "rollmill.training", "rollmill.hooks", "rollmill.recipes"):
        importlib.import_module(name)
    for name in PRELOADED:
        importlib.import_module(f"rollmill.cli.{name}")
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        answer = folder / "answer.json"
        page = FORK.Process(target=answer_request, args=(request, answer))
        page.start()
        page.join()
        print(
            answer.read_text() if answer.exists() else json.dumps({"error": "the page's process died"}), flush=True
        )


def answer_request(request: dict, answer: Path) -> None:
    """Runs a page and writes the result to a file."""
    folder = Path(request["folder"]) / "work"
    folder.mkdir()
    os.chdir(folder)
    os.symlink(ROOT / "examples", folder / "examples")
    os.environ["PATH"] = f"{commands_folder(folder.parent)}{os.pathsep}{os.environ['PATH']}"
    os.environ.pop("XLA_FLAGS", None)
    log = folder.parent / "log.txt"
    chosen = [one for one in snippets_of(ROOT / request["page"]) if is_run(one, slow=request["slow"])]
    error, seconds = None, {}
    program = Program(log)
    for one in chosen:
        begun = time.monotonic()
        error = run_snippet(one, folder, program, log)
        seconds[one.place] = round(time.monotonic() - begun, 1)
        if error:
            break
    program.end()
    printed = log.read_text(errors="replace") if log.exists() else ""
    answer.write_text(json.dumps({"error": error, "printed": printed, "seconds": seconds}))


def is_run(one: Snippet, *, slow: bool) -> bool:
    """Whether a snippet is run."""
    return one.language in ("python", "bash", "toml", "xml") and one.not_run is None and (slow or not one.slow)


def commands_folder(parent: Path) -> Path:
    """A folder with the commands `rollmill` and `python`, which are those of this process."""
    folder = parent / "bin"
    folder.mkdir()
    for name, arguments in (("rollmill", " -m rollmill"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_snippet(one: Snippet, folder: Path, program: "Program", log: Path) -> str | None:
    """Runs a snippet; returns what went wrong."""
    if one.title is not None:
        return write(one, folder)
    if one.language in ("toml", "xml"):
        return None
    if one.language == "python":
        return program.run(one)
    if re.search(r"&\s*(#.*)?$", one.text, re.M):
        return run_in_shell(with_newest(one.text, folder), log, one)
    for command in commands_of(one.text):
        error = run_command(with_newest(command, folder), log, one)
        if error:
            return error
    return None


def write(one: Snippet, folder: Path) -> None:
    """Appends a block to the file of its title."""
    file = folder / str(one.title)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(one.text + "\n\n")


def with_newest(text: str, folder: Path) -> str:
    """The text with the newest run and sweep in the place of RUN and SWEEP."""
    made = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    for word, is_sweep in (("RUN", False), ("SWEEP", True)):
        of_the_kind = [path for path in made if path.name.startswith("sweep-") == is_sweep]
        if of_the_kind:
            text = re.sub(rf"\b{word}\b", str(of_the_kind[-1].relative_to(folder)), text)
    return text


def run_command(command: str, log: Path, one: Snippet) -> str | None:
    """Runs a command: `rollmill` in a process that is forked from this one, others in a shell."""
    words = shlex.split(command)
    path = words[0].removeprefix("PYTHONPATH=") if words[0].startswith("PYTHONPATH=") else None
    words = words[1:] if path else words
    if words[0] != "rollmill" or {"|", ">", "<", "&&"} & set(words):
        return run_in_shell(command, log, one)
    process = FORK.Process(target=rollmill_process, args=(words[1:], path, log))
    process.start()
    process.join(MAX_SECONDS)
    if process.exitcode is None:
        process.kill()
        return f"{one.place}: {command!r} did not end"
    return f"{one.place}: {command!r} exited with {process.exitcode}" if process.exitcode else None


def rollmill_process(words: list[str], path: str | None, log: Path) -> None:
    """The command, as `python -m rollmill` runs it; never returns."""
    from rollmill.cli import main as command

    send_output_to(log)
    if path:
        add_path(path)
    command(words)


def add_path(path: str) -> None:
    """Makes modules of a folder importable, here and in processes that this one starts."""
    sys.path.insert(0, os.path.abspath(path))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.abspath(path), os.environ.get("PYTHONPATH", "")])


def run_in_shell(text: str, log: Path, one: Snippet) -> str | None:
    """Runs lines in bash, which ends with the first that fails."""
    with log.open("ab") as opened:
        opened.write(f"$ {text}\n".encode())
        opened.flush()
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=opened,
                timeout=MAX_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"{one.place}: {text!r} did not end"
    return f"{one.place}: {text!r} exited with {done.returncode}" if done.returncode else None


class Program:
    """The blocks of Python of a page, as one program in a process of its own."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = None

    def run(self, one: Snippet) -> str | None:
        """Executes the next block; returns what went wrong."""
        if self._process is None:
            self._ours, theirs = FORK.Pipe()
            self._process = FORK.Process(target=program_process, args=(theirs, self._log))
            self._process.start()
            theirs.close()
        self._ours.send(one)
        if not self._ours.poll(MAX_SECONDS):
            self._process.kill()
            return f"{one.place} did not end"
        try:
            return self._ours.recv()
        except EOFError:
            return f"{one.place}: the process died"

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._ours.send(None)
            self._process.join(30)
            self._process.kill()


def program_process(connection: Connection, log: Path) -> None:
    """Executes one block after the other, in one scope."""
    send_output_to(log)
    add_path(".")
    scope: dict = {"__name__": "__main__"}
    while (one := connection.recv()) is not None:
        try:
            exec(compile("\n" * (one.line - 1) + one.text, one.page, "exec"), scope)
            sys.stdout.flush()
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


def send_output_to(log: Path) -> None:
    """Sends what this process and its children print to a file."""
    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    os.dup2(nothing, 0)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


if __name__ == "__main__":
    main()
