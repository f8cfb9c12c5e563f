"""Runs `rollmill COMMAND ...`, and converts errors to a message and an exit code."""

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

# Only fast imports: commands that print something short do not import JAX.
from rollmill.cli.output import code_after_output, open_streams
from rollmill.core.errors import RollmillError, unknown_name
from rollmill.core.interruption import Interruption, handling_early_notices
from rollmill.core.machine import leave_device_memory, one_blas_thread, versions, without_collection
from rollmill.core.text import printable, shorten_message


class Command(NamedTuple):
    """A command of `rollmill`: its module, and its summary in the usage text."""

    module: str
    summary: str
    records: bool = False
    """Whether the command's result is a run directory, so that losing its output does no harm."""
    only_acts: bool = False
    """Whether the command computes a policy without training it, often on a GPU that a run is using."""
    forks: bool = False
    """Whether the command forks child processes, which is safe only while it has a single thread."""


COMMANDS = {
    "train": Command(
        "train", "train an algorithm on an environment: rollmill train ppo CartPole-v1", records=True
    ),
    "resume": Command("resume", "resume a stopped run: rollmill resume RUN", records=True),
    "sweep": Command(
        "sweep",
        "train with several values of some options: rollmill sweep ppo CartPole-v1 --over seed=0..4",
        records=True,
        forks=True,
    ),
    "plan": Command("plan", "show the placement of a run's groups, and the edges between them"),
    "warm": Command("warm", "compile a run ahead of time, for later starts: rollmill warm ppo CartPole-v1"),
    "profile": Command("profile", "show where a run spends its time: rollmill profile ppo CartPole-v1"),
    "explain": Command(
        "explain", "show whether an environment can be fused into one kernel: explain fusion CartPole-v1"
    ),
    "evaluate": Command(
        "evaluate", "play episodes or matches with a run's policy: rollmill evaluate RUN", only_acts=True
    ),
    "render": Command(
        "render",
        "show a run's policy in its environment, as GIF, MP4, PNGs or in the terminal: rollmill render RUN",
        only_acts=True,
    ),
    "runs": Command("runs", "list the runs and sweeps in a folder, with their status: rollmill runs [FOLDER]"),
    "board": Command("board", "follow the runs and sweeps in a folder in the browser: rollmill board [FOLDER]"),
    "plot": Command("plot", "draw learning curves of runs and sweeps: rollmill plot RUN [RUN ...]"),
    "play": Command("play", "play a two-player game against a run's policy: rollmill play RUN", only_acts=True),
    "gpu": Command("gpu", "list GPUs, their load and how they can be shared, or divide a GPU with MIG"),
    "serve": Command("serve", "serve a run's policy over HTTP: rollmill serve RUN", only_acts=True),
    "export": Command(
        "export", "export a run's policy as ONNX or StableHLO: rollmill export RUN --format onnx", only_acts=True
    ),
    "list": Command("listing", "list algorithms, environments, networks, transforms and recipes"),
    "completion": Command("completion", "print the completion script for a shell: rollmill completion bash"),
    "help": Command("help_search", "search the options of all commands: rollmill help WORD"),
    "doctor": Command(
        "doctor", "check the installation; doctor RUN replays the step in which a NaN first appeared"
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code: 0, 2 on a usage error, and 130, 140 or 143 on a signal."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    records = bool(words) and words[0] in COMMANDS and COMMANDS[words[0]].records
    owns_process = arguments is None
    forked = words if owns_process else []  # a program that calls this function must not be forked
    action = lambda: _run(words, keeps_modules=owns_process)
    run_and_exit(action, keeps_result=records, before=lambda: _fork(forked))


def run_and_exit(
    action: Callable[[], int], *, keeps_result: bool, before: Callable[[], object] = lambda: None
) -> NoReturn:
    """Runs `action` and exits with its exit code. Errors that users can fix become one sentence and an exit code.

    `before` is called while the process still has a single thread. With `keeps_result`, losing the output is not
    an error, because the result is on disk.
    """
    interruption = Interruption()
    interruption.install()
    output, _ = open_streams()
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode then shows question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        before()
        with handling_early_notices() if keeps_result else contextlib.nullcontext():
            code = _code_of(action)
        if not keeps_result:
            code = code_after_output(code, output)
    except BaseException as error:
        if not (interruption.asked or isinstance(error, KeyboardInterrupt)):
            raise
        print("rollmill: interrupted", file=sys.stderr)
        _exit_at_once(130)
    sys.exit(code)


def _code_of(action: Callable[[], int]) -> int:
    try:
        return action()
    except RollmillError as error:
        return _print_error(error)
    except RuntimeError as error:
        from rollmill.gpus.device_errors import known_device_error

        if (known := known_device_error(error)) is None:
            raise
        return _print_error(known)


def _exit_at_once(code: int) -> NoReturn:
    """Exits without finalising the interpreter, which threads that still compile would crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    return _code_of(lambda: _run(arguments))


def _run(arguments: list[str], *, keeps_modules: bool = False) -> int:
    """Runs a command. With `keeps_modules`, garbage collections skip all objects that its imports created."""
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rollmill {versions()['rollmill']}")
        return 0
    run = _find(arguments[0])
    if keeps_modules:
        gc.freeze()
    return run(arguments[1:])


def _print_error(error: RollmillError) -> int:
    print(f"rollmill: {shorten_message(printable(str(error)))}", file=sys.stderr)
    return error.exit_code


def _fork(words: Sequence[str]) -> None:
    """Forks the process that forks the children of a command, if it has any."""
    if words and (command := COMMANDS.get(words[0])) is not None and command.forks:
        with without_collection(), one_blas_thread():
            module = import_module(f"rollmill.cli.{command.module}")
        module.fork(words[1:])


def _find(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS, hint="`rollmill --help` lists the commands.")
    command = COMMANDS[name]
    with without_collection():
        run = import_module(f"rollmill.cli.{command.module}").run
    if command.only_acts:
        leave_device_memory()
    return run


def usage() -> str:
    """Returns the usage text, which lists all commands."""
    from rollmill.cli.help import two_columns

    return "\n".join(
        [
            "usage: rollmill COMMAND [OPTIONS]",
            "",
            "Reinforcement-learning training in JAX.",
            "",
            "commands:",
            *two_columns((name, command.summary) for name, command in COMMANDS.items()),
            "",
            "`rollmill COMMAND --help` describes a command's options, `rollmill help WORD`",
            "finds an option of any command, and `rollmill -V` prints the version.",
        ]
    )
