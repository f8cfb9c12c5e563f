"""One start of a training with clocks in it, for `start.py`, which runs a copy of this file by the command's name.

    rollmill BEGAN SAMPLES WORD ...

Prints the seconds since BEGAN (by `time.time`), those of processors, and the phases as a line of JSON at the end
of the first iteration. With SAMPLES=1 there are also stacks of the main thread: a thread looks at it every few
milliseconds, and adds the seconds since its last look to every function that the main thread is in.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from importlib import import_module
from typing import Any

MAX_DEPTH, MIN_SECONDS, PAUSE = 24, 0.04, 0.003
spans: list[tuple[str, float, float, str]] = []
began, samples = float(sys.argv[1]), {}
phases = {"before Python": time.time() - began}


def sampled(thread: int) -> None:
    """Adds up the seconds in functions of a thread, by their callers."""
    last = time.perf_counter()
    while True:
        time.sleep(PAUSE)
        frame, stack = sys._current_frames().get(thread), []
        while frame is not None:
            code = frame.f_code
            if "importlib" not in code.co_filename:
                place = "/".join(code.co_filename.rsplit("/", 2)[-2:])
                stack.append(f"{place}:{code.co_name}")
            frame = frame.f_back
        now = time.perf_counter()
        for depth in range(1, min(len(stack), MAX_DEPTH) + 1):
            path = tuple(stack[-depth:])
            samples[path] = samples.get(path, 0.0) + now - last
        last = now


def as_lines() -> list[str]:
    """Returns the functions in which the thread spent most, indented below their callers."""
    by_caller: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path, seconds in samples.items():
        if seconds >= MIN_SECONDS:
            by_caller.setdefault(path[1:], []).append(path)
    lines = []

    def write(caller: tuple[str, ...], depth: int) -> None:
        for path in sorted(by_caller.get(caller, ()), key=samples.__getitem__, reverse=True):
            lines.append(f"{samples[path]:6.2f} {' ' * depth}{path[0]}")
            write(path, depth + 1)

    write((), 0)
    return lines


def note(phase: str, since: float) -> None:
    """Adds a call that ends now to its phase."""
    now = time.time()
    phases[phase] = phases.get(phase, 0.0) + now - since
    if now - since >= MIN_SECONDS:
        name = threading.current_thread().name
        spans.append((phase.strip(), round(since - began, 3), round(now - began, 3), name))


def timed(owner: object, name: str, phase: str) -> None:
    """Adds the seconds of a function's calls to a phase, if this version has the function."""
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        since = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            note(phase, since)

    setattr(owner, name, call)


if sys.argv[2] == "1":
    threading.Thread(target=sampled, args=(threading.get_ident(),), daemon=True).start()
since = time.time()
from rollmill.cli.main import main  # noqa: E402

import_module("rollmill.cli.train")
note("imports", since)

CLOCKS = {
    "rollmill.gpus.jax_settings": [("check_platform", "JAX's backend")],
    "rollmill.training.request": [("ResolvedRequest.graph", "graph")],
    "rollmill.algorithms.fragments": [
        ("check_types", "  checks of the environment"),
        ("network_policy", "  network"),
    ],
    "rollmill.runs.specification": [("fingerprint", "fingerprint"), ("recall_digests", "recalling digests")],
    "rollmill.training.preparing": [
        ("lower", "program"),
        ("claim_before_compiling", "claims of memory"),
        ("claim_compiled", "claims of memory"),
        ("return_freed_memory", "returning memory"),
    ],
    "rollmill.programs.program_store": [
        ("ProgramStore._loaded", "  loading"),
        ("ProgramStore._kept", "  compiling and storing"),
        ("ProgramStore._file", "  names of stored programs"),
        ("surroundings", "  surroundings"),
    ],
    "rollmill.programs.compiled": [("store_for", "  digests of sources")],
    "rollmill.programs.kernel_choice": [("choose_kernels", "  choosing kernels")],
    "rollmill.training.training": [("_start", "start of the run")],
    "jax.stages": [("Traced.lower", "  lowering"), ("Lowered.compile", "  XLA")],
}
for module, clocks in CLOCKS.items():
    for name, phase in clocks:
        owner, _, function = name.rpartition(".")
        try:
            found = import_module(module)
        except ImportError:  # older sources
            continue
        timed(getattr(found, owner) if owner else found, function, phase)


def clock_kernels() -> None:
    """Measures the parts of choosing kernels, whose modules most trainings do without."""
    from rollmill.fusion.backends.triton import compile, parallel_compile
    from rollmill.fusion.tune import timing
    from rollmill.programs import fused_kernels, tuning

    timed(fused_kernels, "lower_rollout", "    lowering a step")
    timed(fused_kernels, "lower_gradients", "    lowering a step")
    timed(fused_kernels, "rollout_search", "    writing kernels")
    timed(fused_kernels, "minibatch_loop_search", "    writing kernels")
    timed(tuning, "wait", "    waiting for candidates")
    timed(tuning, "find_fastest_launch", "    timing")
    timed(tuning, "compile_candidates", "    compiling candidates")
    timed(timing._Timed, "__init__", "      first calls of a candidate")
    timed(timing._Timed, "again", "      more calls of a candidate")
    timed(compile, "compile_file", "  Triton")
    begin = parallel_compile._CompilingProcess.compile

    def begin_timed(self: Any, compilation: Any) -> Any:
        since = time.time()
        result = begin(self, compilation)
        result.add_done_callback(lambda _: note("  Triton in another process", since))
        return result

    parallel_compile._CompilingProcess.compile = begin_timed


if any("fusion" in word for word in sys.argv):
    with contextlib.suppress(ImportError):  # without Triton
        clock_kernels()

program_training = import_module("rollmill.workers.program_training")
reports = import_module("rollmill.workers.reports")
run = program_training.ProgramTraining.run


def until_first(self: object, stopping: object) -> object:
    """Trains until the first metrics, prints what it took, and exits."""
    since = time.time()
    for report in run(self, stopping):
        if isinstance(report, reports.MetricsRows):
            note("first iteration", since)
            used = os.times()
            whole = {"seconds": time.time() - began, "processor": used.user + used.system}
            children = used.children_user + used.children_system
            print(
                json.dumps(
                    {**whole, "children": children, "phases": phases, "spans": spans, "stacks": as_lines()}
                ),
                flush=True,
            )
            os._exit(0)
        yield report


program_training.ProgramTraining.run = until_first
main(["train", *sys.argv[3:], "--quiet", "--no-tensorboard"])
