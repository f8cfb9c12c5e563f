"""Process of a candidate in a plan search: `python -m rollmill.cli.candidate_process PARENT COMMANDS REPORTS`.

It reads a training request as JSON from the first line of the file descriptor COMMANDS, and compiles it. Each
following line is a command: `time` runs a few iterations, `stages` runs the first stage of one, and `begin`
trains. Answers are lines of JSON on the file descriptor REPORTS. The process ends with its parent.
"""

import json
import os
import sys
import threading
import time
from functools import partial
from typing import Any, TextIO

WATCH_SECONDS = 0.01
"""Interval in seconds at which the memory use of devices is sampled."""


def run(parent: str, commands: str, reports: str) -> int:
    """Compiles the requested run and handles commands. Returns the exit code.

    Takes the id of the parent process, and the file descriptors of commands and reports, as decimal numbers.
    """
    from rollmill.core.process_tree import die_with

    die_with(int(parent))
    from rollmill.core.errors import FusionError, RollmillError

    with open(int(commands)) as commands_file, open(int(reports), "w", buffering=1) as reports_file:
        try:
            return _handle_commands(commands_file, reports_file)
        except RollmillError as error:
            depths = error.depths if isinstance(error, FusionError) else ()
            _report(reports_file, error=str(error), depths=depths)
            return error.exit_code


def _handle_commands(commands_file: TextIO, reports_file: TextIO) -> int:
    from rollmill.core.machine import return_freed_memory
    from rollmill.plan_search.compiled_program import (
        describe_program,
        iteration_seconds,
        most_memory,
        process_memory,
        stage_seconds,
    )
    from rollmill.training.request import prepare_request, read_request
    from rollmill.training.training import begin_training

    if not (line := commands_file.readline()):
        return 0
    prepared = prepare_request(read_request(json.loads(line), where="the parent's line"))
    _report(reports_file, program=describe_program(prepared))
    compiled, trained = most_memory(prepared), 0
    for line in commands_file:
        match line.strip():
            case "time":
                _report(reports_file, seconds=iteration_seconds(prepared))
                if (most := most_memory(prepared)) > compiled:  # memory of the compiler does not belong to the run
                    trained = most
            case "stages":
                before = process_memory()
                collect = stage_seconds(prepared)
                _report(reports_file, collect=collect, leftover=max(0, process_memory() - before))
            case "begin":
                return_freed_memory()  # memory of the timing does not belong to the run
                watch = partial(_watch_memory, reports_file, trained=trained)
                threading.Thread(target=watch, daemon=True).start()
                return begin_training(prepared).exit_code
    return 0


def _report(reports_file: TextIO, **report: Any) -> None:
    reports_file.write(json.dumps(report) + "\n")


def _watch_memory(reports_file: TextIO, *, trained: int) -> None:
    """Reports the peak device memory of the run, if devices have separate memory.

    It polls, because the allocator's own maximum includes memory for compilation: XLA tries algorithms on arrays
    that may be far larger than the arrays of the run. `trained` is the number of bytes that iterations of the run
    have used on a device, or 0 if unknown.
    """
    import jax

    from rollmill.plan_search.compiled_program import memory_in_use

    devices = [device for device in jax.local_devices() if device.memory_stats()]
    reported, most = 0, trained
    while devices:
        time.sleep(WATCH_SECONDS)
        most = max(most, memory_in_use(devices))
        if most > reported:
            try:
                _report(reports_file, peak=most)
            except (OSError, ValueError):  # the parent or the training thread has ended
                return
            reported = most


if __name__ == "__main__":
    code = run(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
