"""Compiles several kernels at once, each in a process of its own.

Triton's front end is Python, and so holds Python's lock: in threads, kernels are compiled one after the other for
the greater part. Processes leave what they have compiled in Triton's cache, where `compile.call` finds it.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

from rollmill.core.machine import usable_cores
from rollmill.fusion.backends.triton import compile_file
from rollmill.fusion.backends.triton.compile_file import Compilation


def compile_side_by_side(compilations: Sequence[Compilation]) -> None:
    """Fills Triton's cache; what fails here is compiled again, and its error raised, where it is called."""
    count = min(usable_cores(), len(compilations))
    if count < 2:
        return
    with contextlib.ExitStack() as processes:
        for n in range(count):
            # Dealt out in turns, so that no process is left with all of the large ones.
            lines = "".join(json.dumps(each) + "\n" for each in compilations[n::count])
            processes.enter_context(_compiling(lines))


@contextlib.contextmanager
def _compiling(lines: str):
    """A process that compiles; it is waited for at the end, or killed where something else has failed."""
    try:
        # `-P`: the modules beside this file are no modules of Triton's.
        process = subprocess.Popen(
            [sys.executable, "-P", compile_file.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        yield
        return
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(lines)
        yield
        process.wait()
    finally:
        process.kill()
        process.wait()
