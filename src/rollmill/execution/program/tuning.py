"""Searches for fast kernels: all candidates are compiled in the background, and then timed one after the other."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

from rollmill.fusion import Search, Tuned, compile_candidates, fastest

T = TypeVar("T")


class Tuner:
    """Runs searches on one device; as a context manager it waits for what it has begun to compile.

    Nothing is timed before everything is compiled, so that no compilation disturbs a time.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(thread_name_prefix="rollmill-compile")
        self._compiling: list[Future[Any]] = []

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def compile(self, function: Callable[..., Any], *shapes: Any) -> Future[Callable[..., Any]]:
        """Compiles a function for these shapes, in the background."""
        return self._submit(lambda: jax.jit(function).lower(*shapes).compile())

    def start(self, search: Search, arguments: Callable[[], Sequence[Any]]) -> Callable[[], Tuned]:
        """Starts to compile the candidates of a search; returns the function that times them.

        Args:
            search: what to find.
            arguments: makes the arguments of the candidates, on the device; called by the function.
        """
        if (stored := search.stored()) is not None:
            return lambda: stored
        candidates = self._submit(lambda: compile_candidates(search))

        def finish() -> Tuned:
            values = arguments()  # made while candidates are compiled
            wait(self._compiling)
            return fastest(search, candidates.result(), values)

        return finish

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def on_device() -> T:
            with jax.default_device(self._device):
                return work()

        future = self._pool.submit(on_device)
        self._compiling.append(future)
        return future
