"""The exception by which a call from Python ends after Ctrl-C."""

import signal
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class _HasExitCode(Protocol):
    @property
    def exit_code(self) -> int:
        """128 and the number of the signal that stopped it."""
        ...


Result = TypeVar("Result", bound=_HasExitCode)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a training, a sweep or a profile, raised once all is saved.

    Args:
        result: what the call would have returned; of a training the `Run`, with which `rollmill.resume` goes on.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(f"stopped by Ctrl-C; saved in {getattr(result, 'directory', 'its result')}")
        self.result = result


def pass_on_interrupt(result: Result) -> Result:
    """Returns the result of a call, or raises `Interrupted` if Ctrl-C stopped it under Python's own handler.

    The command line, and programs with a handler of their own for SIGINT, look at the exit code instead.
    """
    by_interrupt = result.exit_code == 128 + signal.SIGINT
    if by_interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise Interrupted(result)
    return result
