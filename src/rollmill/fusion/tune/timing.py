"""Times a kernel with several launch configurations to find the fastest.

Results are stored by device, size, and the versions of JAX and the compiler.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import jax

from rollmill.core.errors import CannotFuse, CheckpointError, DataError
from rollmill.core.json_data import short_json
from rollmill.core.schema import read_as
from rollmill.fusion.backends.base import CompilingAhead
from rollmill.fusion.cache import cached_file, read_cached, write_once

clock = time.perf_counter
"""Returns the current time in seconds, from an arbitrary origin."""

REPEATS, CALLS = 5, 10
UNFUSED_REPEATS = 2
FAR = 1.25
"""A launch is timed only once if its first call takes this many times as long as the fastest launch's."""
NEAR = 1.03
"""Ratio below which two times count as equal. The first of equally fast launches is taken, so that
searches agree."""
SECONDS = 0.1
"""Target duration of a timing in seconds. It consists of up to `CALLS` calls in a row, and of fewer if they are
slow."""


Compile: TypeAlias = Callable[[Callable[..., Any], Sequence[Any]], Callable[..., Any]]
"""Function that compiles another function for the shapes of its arguments."""


class TunedLaunch(NamedTuple):
    """The fastest launch configuration of a kernel, with its time."""

    launch: tuple[int, ...]
    seconds: float | None = None
    """Seconds per call of the kernel, or None if it was not timed."""
    unfused_seconds: float | None = None
    """Seconds for the same computation by XLA, without a kernel, or None if it was not timed."""

    @property
    def speedup(self) -> float | None:
        """Speedup over XLA, the ratio of both durations, or None if they were not timed."""
        if self.seconds is None or self.unfused_seconds is None:
            return None
        return self.unfused_seconds / self.seconds


@dataclass(frozen=True)
class StoredLaunch:
    """The result of a search for the fastest launch, as stored in JSON."""

    launch: tuple[int, ...]
    seconds: float | None
    unfused_seconds: float | None


class LaunchSearch(NamedTuple):
    """A search for the fastest launch of a kernel. Only timing needs arrays, while everything else works with
    shapes.
    """

    file: Path
    """Cache file for the result."""
    launches: Sequence[tuple[int, ...]]
    fused: Callable[[Any], Callable[..., Any]]
    """Returns the function that uses the kernel with a given launch."""
    unfused: Callable[..., Any] | None
    """The same function without a kernel, or None if the user asked for the kernel regardless of its speed."""
    shapes: Sequence[Any]
    """Shapes of the arguments that both functions take."""
    compile_ahead: Callable[[], CompilingAhead]
    """Compiles the kernels of all launches in parallel, before the functions that call them."""
    kernel_only: Callable[[Any], Callable[..., Any]] | None = None
    """Returns a function that runs only the kernel with a given launch, which compiles faster than the whole
    function. None to compare whole functions."""
    inputs: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments
    """Computes the arguments of the kernel from the arguments of the whole function, to time the kernel
    separately."""
    size: int = 0
    """Number of characters of the kernel's source, by which the seconds of a search are predicted."""
    make_check: Callable[[Any], Callable[..., Any] | None] = lambda launch: None
    """Returns a function of the kernel's arguments that compares a launch with the reference, or None for launches
    that need no comparison."""
    compile_seconds: float = 0.0
    """Approximate seconds that one kernel takes to compile, or 0 if unknown."""

    def stored_result(self) -> TunedLaunch | None:
        """Returns the stored result of an earlier search, or None."""
        return read_cached(self.file, self._read)

    def without_comparison(self) -> "LaunchSearch":
        """Returns a search that does not time the unfused function. A search with a stored result is returned
        unchanged.
        """
        if self.stored_result() is not None:
            return self
        return self._replace(unfused=None, file=self.file.with_stem(f"{self.file.stem}-alone"))

    def _read(self, document: Any) -> TunedLaunch:
        """Returns the result that a document holds.

        Raises:
            DataError: it holds something else.
        """
        stored = read_as(StoredLaunch, document, where=str(self.file))
        if stored.launch not in set(map(tuple, self.launches)):
            raise DataError(f"{self.file}: launch {short_json(stored.launch)} is not one of the candidates.")
        if any(time is not None and not 0 < time < math.inf for time in (stored.seconds, stored.unfused_seconds)):
            raise DataError(f"{self.file}: times must be finite and greater than 0.")
        return TunedLaunch(stored.launch, stored.seconds, stored.unfused_seconds)


def file_of(what: Sequence[str], launches: Sequence[tuple[int, ...]], package: str) -> Path:
    """Returns the cache file for the result of a search among `launches`.

    `what` identifies everything else that affects the times, except the versions of packages.
    """
    return cached_file("launches", [*what, list(map(str, launches))], packages=[package])


def _compile(function: Callable[..., Any], shapes: Sequence[Any]) -> Callable[..., Any]:
    return jax.jit(function).lower(*shapes).compile()


def compile_candidates(
    search: LaunchSearch, wait_for_kernel: Callable[[int], object] = lambda number: None
) -> Sequence[Callable[[], Callable[..., Any]]]:
    """Compiles the kernels of all launches in parallel, followed by the unfused function if there is one.

    Kernels are compiled as part of whole functions, or separately if the search allows it. `wait_for_kernel` waits
    for the kernel of a launch, by its number, if it is compiled in another process. Each result is a function that
    returns the compiled function or raises its error.
    """

    def compiled_candidate(number: int, shapes: Sequence[Any]) -> Callable[..., Any]:
        wait_for_kernel(number)
        return _compile((search.kernel_only or search.fused)(search.launches[number]), shapes)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The largest first, because it takes longest.
        unfused = [] if search.unfused is None else [pool.submit(_compile, search.unfused, search.shapes)]
        shapes = search.shapes if search.kernel_only is None else jax.eval_shape(search.inputs, *search.shapes)
        fused = [pool.submit(compiled_candidate, number, shapes) for number in range(len(search.launches))]
    return [future.result for future in (*fused, *unfused)]


def find_fastest_launch(
    search: LaunchSearch,
    candidates: Sequence[Callable[[], Callable[..., Any]]],
    arguments: Sequence[Any],
    is_late: Callable[[], bool] = lambda: False,
    inputs: Sequence[Any] | None = None,
    compile_whole: Compile = _compile,
) -> TunedLaunch:
    """Times the compiled candidates, and returns the fastest launch.

    `candidates` come from `compile_candidates`. `arguments` and `inputs` must already be on the device. Once
    `is_late` returns True, timing stops, and the fastest launch so far is returned but not stored. `compile_whole`
    compiles the function with the fastest kernel. Raises `CannotFuse` if this fails or no launch runs on this
    device.
    """
    runs: dict[Any, _Timed] = {}
    last = None
    # Errors are stored with their launch, because a launch that does not fit the chip does not end the search.
    fused, unfused = candidates[: len(search.launches)], candidates[len(search.launches) :]
    if search.kernel_only is not None and inputs is None:
        inputs = jax.jit(search.inputs)(*arguments)
    given = arguments if search.kernel_only is None else inputs or ()
    for launch, function in zip(search.launches, fused, strict=True):
        if runs and is_late():
            break
        try:
            runs[launch] = _Timed(function(), given)
        except (
            CannotFuse,
            RuntimeError,
            ValueError,
        ) as error:  # needs too many registers or too much memory on the chip
            last = error
    if not runs:
        raise CannotFuse(f"no launch of the kernel runs on this device: {last}") from last
    best = _fastest_right(search, runs, given)
    plain = [_Timed(function(), arguments) for function in unfused]
    whole = runs[best]
    if plain and search.kernel_only is not None:  # the separate kernel cannot be compared with a whole function
        whole = _whole(search, best, arguments, compile_whole)
        _time_in_turns([whole], UNFUSED_REPEATS)
    _time_in_turns(plain, UNFUSED_REPEATS)
    tuned = TunedLaunch(tuple(best), whole.seconds, *(run.seconds for run in plain))
    if is_late():
        return tuned
    with contextlib.suppress(OSError, CheckpointError):  # if the result cannot be stored, the next run times again
        write_once(search.file, json.dumps(tuned._asdict()))
    return tuned


def _fastest_right(search: LaunchSearch, runs: dict[Any, "_Timed"], given: Sequence[Any]) -> Any:
    """Returns the fastest launch whose results are right."""
    while runs:
        best, is_right = _fastest_of(runs), True
        if (agrees := search.make_check(best)) is not None:
            try:
                is_right = bool(jax.jit(agrees)(*given))
            except RuntimeError:  # for example, the reference needs more memory than the kernel
                is_right = False
        if is_right:
            return best
        del runs[best]
    raise CannotFuse("no launch of the kernel gives the same results as the reference on this device")


def _fastest_of(runs: Mapping[Any, "_Timed"]) -> Any:
    """Returns the fastest launch, after timing the fastest launches several times."""
    first = min(run.seconds for run in runs.values())
    near = {launch: run for launch, run in runs.items() if run.seconds < FAR * first}
    _time_in_turns(list(near.values()), REPEATS)
    shortest = min(run.seconds for run in near.values())
    return next(launch for launch, run in near.items() if run.seconds < NEAR * shortest)


def _whole(search: LaunchSearch, launch: Any, arguments: Sequence[Any], compile_whole: Compile) -> "_Timed":
    """Returns the whole function with this launch, which may need more memory than the kernel on its own."""
    try:
        return _Timed(compile_whole(search.fused(launch), search.shapes), arguments)
    except (RuntimeError, ValueError) as error:
        raise CannotFuse(f"the fastest kernel does not run on this device: {error}") from error


class _Timed:
    """A function with the shortest time of its calls, which other programs of the machine lengthen the least."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._function, self._arguments = function, arguments
        jax.block_until_ready(function(*arguments))
        self.seconds = _seconds_of(1, function, arguments)

    def again(self) -> None:
        """Times several consecutive calls, which hides the gaps between calls."""
        calls = max(1, min(CALLS, round(SECONDS / self.seconds)))
        self.seconds = min(self.seconds, _seconds_of(calls, self._function, self._arguments))


def _time_in_turns(runs: Sequence[_Timed], repeats: int) -> None:
    """Times functions in turns, so that a slowdown of the machine affects all functions."""
    for _ in range(repeats):
        for run in runs:
            run.again()


def time_call(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Returns the median duration of a call in seconds, over several timings of consecutive calls."""
    jax.block_until_ready(function(*arguments))
    # Consecutive calls hide the time between calls, in which the device would wait for the host.
    calls = max(1, min(CALLS, round(SECONDS / _seconds_of(1, function, arguments))))
    return median(_seconds_of(calls, function, arguments) for _ in range(REPEATS))


def _seconds_of(calls: int, function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    began = clock()
    for _ in range(calls):
        results = function(*arguments)
    jax.block_until_ready(results)
    return (clock() - began) / calls
