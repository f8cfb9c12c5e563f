"""Searches for fast kernels: all candidates are compiled in the background, and then timed one after the other."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

import jax

from rollmill.fusion import Search, Tuned, compile_candidates, fastest

T = TypeVar("T")

Arguments: TypeAlias = Callable[[], Sequence[Any]]
"""Makes the arguments of a search's candidates, on the device."""


class Tuner:
    """Runs searches on one device; what still compiles when its context is left by an error is ended.

    Nothing is timed before everything is compiled, so that no compilation disturbs a time.

    Args:
        device: the device.
        before_timing: waits for what the caller compiles.
    """

    def __init__(self, device: Any, before_timing: Callable[[], object] = lambda: None) -> None:
        self._device, self._before_timing = device, before_timing
        self._pool = ThreadPoolExecutor(thread_name_prefix="rollmill-compile")
        self._kernels = contextlib.ExitStack()
        self._compiling: list[Future[Any]] = []
        self._began: float | None = None
        self.seconds = 0.0
        """Seconds from the start of the first search to the end of the last; 0 where all results were stored."""
        self._closed = False

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._closed = kind is not None
        self._kernels.close()
        # After an interruption nobody waits: whoever interrupts a search wants it to end at once.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def compile(self, function: Callable[..., Any], *shapes: Any) -> Future[Callable[..., Any]]:
        """Compiles a function for these shapes, in the background."""
        return self._submit(lambda: jax.jit(function).lower(*shapes).compile())

    def start(self, search: Search, prepare: Callable[[], Arguments]) -> Callable[[], Tuned]:
        """Starts to compile the candidates of a search; returns the function that times them.

        `prepare` begins to prepare the arguments; it is called only if something has to be timed.
        """
        if (stored := search.stored()) is not None:
            return lambda: stored
        began = self._began = time.perf_counter() if self._began is None else self._began
        wait_for_kernels = self._kernels.enter_context(search.compile_ahead())
        candidates = self._submit(lambda: self._compile_candidates(search, wait_for_kernels))
        arguments = prepare()

        def finish() -> Tuned:
            values = arguments()  # made while candidates are compiled
            wait(self._compiling)
            self._before_timing()
            try:
                return fastest(search, candidates.result(), values)
            finally:
                self.seconds = time.perf_counter() - began

        return finish

    def _compile_candidates(self, search: Search, wait_for_kernels: Callable[[], None]) -> Sequence[Any]:
        wait_for_kernels()
        return () if self._closed else compile_candidates(search)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def on_device() -> T:
            with jax.default_device(self._device):
                return work()

        future = self._pool.submit(on_device)
        self._compiling.append(future)
        return future
