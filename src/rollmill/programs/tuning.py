"""Searches for fast kernels: compiles all candidates in the background, and then times them one after
the other.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

import jax

from rollmill.core.errors import CannotFuse
from rollmill.core.machine import usable_cores
from rollmill.fusion import LaunchSearch, TunedLaunch, compile_candidates, find_fastest_launch
from rollmill.lowerings.threefry import small_programs
from rollmill.programs.compiler_options import single_call_options
from rollmill.programs.search_cost import SearchBudget

T = TypeVar("T")

Arguments: TypeAlias = Callable[[], Sequence[Any]]
"""Function that creates the arguments with which candidates are timed, on the device."""


class Tuner:
    """Context manager that runs searches for kernels on one device.

    Timing begins only after everything is compiled, so that compilation does not disturb the times. If an error
    leaves the context, compilations are cancelled.

    Args:
        device: the device.
        before_timing: waits until the caller has compiled its own programs.
        budget: limits the seconds of all searches, from now on. None for no limit. No search begins that is not
            expected to end in time. At the limit, a search that is timing returns the fastest launch so far, and a
            search that is still compiling returns none.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        device: Any,
        before_timing: Callable[[], object] = lambda: None,
        budget: SearchBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._before_timing = device, before_timing
        self.budget, self._clock = budget, clock
        self._pool = ThreadPoolExecutor(thread_name_prefix="rollmill-compile")
        self._kernels = contextlib.ExitStack()
        self._compiling: list[Future[Any]] = []
        self._opened = clock()
        self._began: float | None = None
        self.seconds = 0.0
        """Seconds from the start of the first search to the end of the last, or 0 if all results were stored."""
        self.was_late = False
        """Whether a search came to its limit."""
        self._closed = False

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._closed = ends_at_once = kind is not None or self.was_late
        self._kernels.close()
        # After an exception or a timeout, does not wait for compilations, because the caller wants the search to
        # end.
        self._pool.shutdown(wait=not ends_at_once, cancel_futures=True)

    def keep_running(self, compilers: contextlib.AbstractContextManager[object]) -> None:
        """Keeps processes that compile kernels running until the end of all searches."""
        self._kernels.enter_context(compilers)

    def compile(self, function: Callable[..., Any], *shapes: Any) -> Future[Callable[..., Any]]:
        """Compiles a function for arguments of these shapes in the background."""
        return self._submit(lambda: jax.jit(function).lower(*shapes).compile())

    def compile_once(self, function: Callable[..., Any], *shapes: Any) -> Future[Callable[..., Any]]:
        """Compiles a function that is called only once in the background."""

        def compile_fast() -> Callable[..., Any]:
            with small_programs(self._device.platform):
                return jax.jit(function).lower(*shapes).compile(single_call_options())

        return self._submit(compile_fast)

    def start(self, search: LaunchSearch, prepare: Callable[[], Arguments]) -> Callable[[], TunedLaunch]:
        """Starts to compile a search's candidates. Returns a function that waits, times them and returns the
        fastest.

        `prepare` begins to create the arguments for timing. It is called only if something has to be timed.
        """
        if (stored := search.stored_result()) is not None:
            return lambda: stored
        spent = self._seconds_spent()
        if self.budget is not None:
            self.budget.admit(search.file, _size(search), spent, search.compile_seconds * _turns(search))
        began = self._began = self._clock() if self._began is None else self._began
        wait_for_kernel = self._unless_closed(self._kernels.enter_context(search.compile_ahead()))
        compiled_at: list[float] = []

        def compile_all() -> Sequence[Any]:
            compiled = compile_candidates(search, wait_for_kernel)
            compiled_at.append(self._seconds_spent())
            return compiled

        candidates = self._submit(compile_all)
        arguments = prepare()
        inputs = None if search.kernel_only is None else self.compile(search.inputs, *search.shapes)

        def finish() -> TunedLaunch:
            made = self._submit(arguments)  # while candidates are compiled, and within the limit
            waited = 0.0  # for other searches that compile at the same time
            try:
                self._wait()
                compiled, values = candidates.result(), made.result()
                waited = self._seconds_spent() - compiled_at[0]
                self._before_timing()
                computed = inputs and inputs.result()(*values)
                return find_fastest_launch(
                    search, compiled, values, self._is_late, computed, self._compile_in_time
                )
            finally:
                self.seconds = self._clock() - began
                if self.budget is not None:
                    own = self._seconds_spent() - spent - waited
                    self.budget.end(search.file, _size(search), own, was_late=self.was_late)

        return finish

    def _wait(self) -> None:
        """Waits for all compilations. Raises `CannotFuse` at the limit."""
        left = self._seconds_left()
        unfinished = wait(self._compiling, None if left == math.inf else max(0.0, left)).not_done
        if unfinished:
            self.was_late = True
            raise CannotFuse(
                f"compiling the kernels takes more than {self._limit:.0f} s, the limit for all searches in this "
                "run"
            )

    def _compile_in_time(self, function: Callable[..., Any], shapes: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a function. Raises `CannotFuse` at the limit."""
        compiled = self.compile(function, *shapes)
        self._wait()
        return compiled.result()

    def _is_late(self) -> bool:
        self.was_late |= self._seconds_left() <= 0
        return self.was_late

    def _seconds_left(self) -> float:
        """Returns the seconds until the limit."""
        return self._limit - self._seconds_spent()

    @property
    def _limit(self) -> float:
        return math.inf if self.budget is None else self.budget.limit

    def _seconds_spent(self) -> float:
        return self._clock() - self._opened

    def _unless_closed(self, wait_for_kernel: Callable[[int], None]) -> Callable[[int], None]:
        """Returns a function that waits for a kernel, and raises `CancelledError` if the searches have ended."""

        def wait_unless_closed(number: int) -> None:
            wait_for_kernel(number)
            if self._closed:
                raise CancelledError

        return wait_unless_closed

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def on_device() -> T:
            with jax.default_device(self._device):
                return work()

        future = self._pool.submit(on_device)
        self._compiling.append(future)
        return future


def _size(search: LaunchSearch) -> int:
    """Returns the characters of a kernel's source, times the number of kernels that one core compiles."""
    return max(1, search.size) * _turns(search)


def _turns(search: LaunchSearch) -> int:
    """Returns the number of kernels that one core compiles."""
    return math.ceil(len(search.launches) / usable_cores())
