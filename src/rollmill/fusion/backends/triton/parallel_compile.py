"""Compiles several Triton kernels in parallel, in separate processes.

The front end of Triton is Python code that holds the GIL, so threads would mostly compile one kernel after the
other. The processes fill the Triton cache, where `compile.call` finds the kernels.
"""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence

from rollmill.core.child_processes import start_python
from rollmill.core.machine import usable_cores
from rollmill.fusion.backends.triton import compile_file
from rollmill.fusion.backends.triton.compile_file import Compilation


@contextlib.contextmanager
def compiling_side_by_side(compilations: Sequence[Compilation]) -> Iterator[Callable[[], None]]:
    """Compiles kernels into the Triton cache in the background.

    Yields a function that waits until all are compiled. On exit, compilations that are still running are
    cancelled. If a kernel does not compile here, its caller compiles it again and raises the error.
    """
    count = min(usable_cores(), len(compilations))
    with contextlib.ExitStack() as stack:
        # Distributed in turn, so that the large kernels do not all go to one process.
        shares = [compilations[n::count] for n in range(count)] if count > 1 else []
        lines = ["".join(json.dumps(each) + "\n" for each in share) for share in shares]
        waits = [stack.enter_context(_compiling(share)) for share in lines]

        def wait() -> None:
            if waits:
                _import_compiler()
            for wait_for_process in waits:
                wait_for_process()

        yield wait


def _import_compiler() -> None:
    """Imports Triton, which takes about a second, while the processes compile. The caller needs it afterwards."""
    with contextlib.suppress(ImportError):
        import triton.compiler

        assert triton.compiler is not None


@contextlib.contextmanager
def _compiling(lines: str) -> Iterator[Callable[[], object]]:
    """Runs a compiling process. Yields a function that waits for it, and kills it at the end."""
    try:
        process = start_python(
            compile_file.__file__,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        yield lambda: None
        return
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(lines)
        yield process.wait
    finally:
        process.kill()
        process.wait()
