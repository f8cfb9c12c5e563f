"""Whether kernels compute what XLA computes, for programs drawn at random and for games, on a CPU or on one GPU.

    python benchmarks/fusion_programs.py [--programs 3000] [--processes 1]
    python benchmarks/fusion_programs.py --faults [--programs 150]
    python benchmarks/fusion_programs.py --gpu --games [--programs 400] [--seconds 420] [--processes 16]

The programs are those of tests/fusion/drawn_programs.py: control flow in control flow, `vmap` in `vmap`,
indexing, sorting, linear algebra and random numbers, for all types and their edge values. On a CPU each is
computed unfused by XLA, with the passes of Rollmill's own unfused programs, by the reference and as machine
code. With `--gpu`, each is computed as a Triton kernel there and compared with XLA on the CPU; where they
differ, XLA on the GPU is compared, too. Integers and flags are compared exactly. So are floats, which are whole
numbers, except for those of operations that round: these may differ by a relative 1e-4. `--games` plays 256
steps of four copies of each game of tests/fusion/game_environments.py, and compares them with XLA on the CPU
also where there is a GPU; XLA on the GPU is then one of the ways. `--faults` makes the compiler wrong on
purpose, in one place after the other, and counts the programs that it takes to find that; of these, only
outputs with a primitive that the fault concerns are computed.

Each process is given one program after the other. One that takes longer than `--limit` seconds is ended and
counted as `late`. Rows are appended to a file beside the result as they come, and `--add` goes on from them.
What differs is made smaller and printed. Writes results/fusion-programs.json, fusion-programs-gpu.json or
fusion-programs-faults.json; `--output` names another folder.
"""

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1] / "tests" / "fusion"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

FIRST = 100_000
"""The seed of the first program, beyond those of the tests."""
GAME_STEPS, GAME_COPIES = 256, 4
MAX_LINES = 4_000
"""Lines of a drawn kernel's source. Triton compiles longer ones for minutes, and they count as refused."""
MAX_TASKS = 40
"""Programs of one process: what it has compiled stays in its memory."""
SHRINKING = 50.0
"""Seconds for making smaller what differs; a program's verdict is not to be late for it."""


def main() -> None:
    # Before JAX is imported: this process and all others share the GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if "--gpu" not in sys.argv:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from measure import options, write_result

    chosen = options(
        __doc__,
        programs=3000,
        first=(FIRST, "seed of the first program"),
        gpu=(False, "as Triton kernels on a GPU"),
        faults=(False, "find faults that are made on purpose"),
        games=(False, "play games, too"),
        processes=1,
        limit=(float, "seconds that one task may take; 120, of a fault 500"),
        seconds=(float("inf"), "no program begins later than that"),
        add=(False, "keep the rows of an earlier run, and do what it lacks"),
    )
    name = "fusion-programs" + ("-gpu" if chosen.gpu else "-faults" if chosen.faults else "")
    chosen.output.mkdir(parents=True, exist_ok=True)
    chosen.limit = chosen.limit or (500 if chosen.faults else 120)
    begin, file = time.monotonic(), chosen.output / f"{name}.rows.jsonl"
    found = earlier_rows(file) if chosen.add else []
    done = [row["task"] for row in found]
    tasks = [task for task in tasks_of(chosen) if json.loads(json.dumps(task)) not in done]
    with file.open("w") as rows:
        rows.writelines(json.dumps(row) + "\n" for row in found)
        found += [row for row in run_all(tasks, chosen) if rows.write(json.dumps(row) + "\n") and not rows.flush()]
    result = summary(found) | {"seconds": round(time.monotonic() - begin), "first": chosen.first}
    print(json.dumps(result["counts"], indent=2))
    write_result(name, result, chosen.output)


def earlier_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run, without tasks that it did not end."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["outcome"] not in ("not begun", "late", "died")]


def tasks_of(chosen: Any) -> list[tuple[str, Any]]:
    """A task for each fault, or for each game and each program; games take longest, and so begin first."""
    if chosen.faults:
        from faults import FAULTS

        return [("fault", (name, chosen.programs)) for name in FAULTS]
    from game_environments import GAMES

    games = [("game", name) for name in GAMES] if chosen.games else []
    seeds = range(chosen.first, chosen.first + chosen.programs)
    return [*games, *(("program", seed) for seed in seeds)]


# --- processes ------------------------------------------------------------------------------------------


class Worker(NamedTuple):
    """A process, what it works on, and since when."""

    process: Any
    answers: Connection
    task: Any
    since: float
    tasks: int = 1


def run_all(tasks: list[Any], chosen: Any) -> Any:
    """The rows of all tasks, in the order in which they end."""
    context, pending = multiprocessing.get_context("spawn"), tasks[::-1]
    workers: list[Worker] = []
    end = time.monotonic() + chosen.seconds
    while pending or workers:
        if time.monotonic() > end:
            yield from (row_of(task, "not begun") for task in pending)
            pending.clear()
        while pending and len(workers) < chosen.processes:
            workers.append(begun(context, pending.pop(), chosen.gpu))
        ready = wait([worker.answers for worker in workers], timeout=1)
        working, workers = workers, []
        for worker in working:
            rows = answer_of(worker, worker.answers in ready, chosen.limit)
            yield from rows
            workers += [worker] if not rows else next_task(worker, pending)


def row_of(task: Any, outcome: str, detail: str = "") -> dict[str, Any]:
    """What is said of a task that has given no rows itself."""
    return {"task": task, "way": "", "outcome": outcome, "detail": detail}


def answer_of(worker: Worker, has_answered: bool, limit: float) -> list[dict[str, Any]]:
    """The rows that a process gives; none while it works, and one that says so where it is late or has died."""
    if has_answered:
        try:
            return worker.answers.recv()
        except EOFError:
            worker.process.join()
            return [row_of(worker.task, "died", str(worker.process.exitcode))]
    if time.monotonic() - worker.since <= limit:
        return []
    worker.process.kill()
    worker.process.join()
    return [row_of(worker.task, "late")]


def next_task(worker: Worker, pending: list[Any]) -> list[Worker]:
    """The same process with its next task; none where it is dead, has done enough, or nothing is left to do."""
    if not worker.process.is_alive():
        return []
    task = pending.pop() if pending and worker.tasks < MAX_TASKS else None
    worker.answers.send(task)
    return [worker._replace(task=task, since=time.monotonic(), tasks=worker.tasks + 1)] if task else []


def begun(context: Any, task: Any, gpu: bool) -> Worker:
    """A new process that works on a task."""
    own, other = context.Pipe()
    process = context.Process(target=work, args=(other, gpu), daemon=True)
    process.start()
    other.close()
    own.send(task)
    return Worker(process, own, task, time.monotonic())


def work(tasks: Connection, gpu: bool) -> None:
    """Computes one task after the other, until there is none."""
    while (task := tasks.recv()) is not None:
        kind, which = task
        begin = time.monotonic()
        rows = fault_rows(*which) if kind == "fault" else ROWS[kind](which, gpu)
        seconds = round(time.monotonic() - begin, 3)
        tasks.send([{"task": task, "seconds": seconds} | row for row in rows])


def ways(gpu: bool, max_lines: float = float("inf")) -> dict[str, Any]:
    """Returns the ways to compute a program. Kernels with more than `max_lines` lines of source are refused."""
    from drawn_compare import WAYS

    if not gpu:
        return WAYS
    import jax
    import jax.numpy as jnp
    from kernel_runs import evaluate_by_kernel, kernel_of

    from rollmill.fusion import CannotFuse

    assert jax.default_backend() == "gpu", "there is no GPU"
    arrays = lambda own: [jnp.asarray(x) for x in own]

    def kernel(program: Any, inputs: Any, uniforms: Any, *, block: int) -> Any:
        lines = kernel_of(program, len(inputs), len(uniforms), block).source.count("\n")
        if lines > max_lines:
            raise CannotFuse(f"a kernel of more than {max_lines:,} lines compiles for minutes.")
        return evaluate_by_kernel(program, arrays(inputs), arrays(uniforms), block=block)

    return {"kernel": kernel}


def program_rows(seed: int, gpu: bool) -> list[dict[str, Any]]:
    """The verdicts on a program; where it differs, with the smallest one that does."""
    import jax
    from drawn_compare import (
        AS_UNFUSED,
        QUICKLY,
        Case,
        case_of,
        compare_with,
        is_wrong,
        smallest,
        unfused,
        verdict_on,
    )
    from drawn_text import to_json

    def expected(case: Case) -> list[Any]:
        return unfused(case, QUICKLY, device=jax.devices("cpu")[0])

    def verdicts(case: Case) -> list[Any]:
        return compare_with(lambda: expected(case), case, own)

    own, case = ways(gpu, MAX_LINES), case_of(seed)
    found = verdicts(case)
    rows = [verdict._asdict() for verdict in found]
    if gpu and any(verdict.outcome == "differs" for verdict in found):
        # A GPU's programs have no options of CPUs'.
        options = {name: value for name, value in AS_UNFUSED.items() if "cpu" not in name}
        there = verdict_on("XLA on the GPU", unfused(case, options), case, expected(case))
        rows.insert(0, there._asdict())
    if is_wrong(found):
        end = time.monotonic() + SHRINKING
        small = smallest(case, lambda one: time.monotonic() < end and is_wrong(verdicts(one)))
        rows[-1]["smallest"] = list(map(to_json, small.outputs))
    return rows


def game_rows(name: str, gpu: bool) -> list[dict[str, Any]]:
    """In how many of its steps a game differs from XLA on the CPU, in each way."""
    from drawn_compare import WAYS
    from game_runs import differing, differing_from, steps_by_xla, unfused_steps

    own = ways(gpu) | ({"reference": WAYS["reference"]} if gpu else {})
    try:
        steps = unfused_steps(name, steps=GAME_STEPS, copies=GAME_COPIES)
        counts = {way: differing(steps, run) for way, run in own.items()}
        if gpu:
            counts["XLA on the GPU"] = differing_from(steps, steps_by_xla(name, steps))
    except Exception as error:
        return [{"way": "", "outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:500]}]
    total = GAME_STEPS * GAME_COPIES
    outcome = lambda count: "differs" if count else "equal"
    return [
        {"way": way, "outcome": outcome(count), "detail": f"{count} of {total} steps differ"}
        for way, count in counts.items()
    ]


ROWS = {"program": program_rows, "game": game_rows}


def fault_rows(name: str, most: int) -> list[dict[str, Any]]:
    """How many programs it takes to find a fault."""
    from fault_runs import found

    finding = found(name, most)
    if finding is None:
        return [{"way": "", "outcome": "not found", "detail": f"in {most} programs"}]
    detail = f"by the program {finding.programs}: {finding.outcome}, {finding.detail}"
    return [{"way": "", "outcome": "found", "programs": finding.programs, "detail": detail}]


# --- the result -----------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of programs and games by way and outcome, reasons of refusals, and all that is not equal."""
    counts: dict[str, Counter] = {}
    for row in rows:
        name = f"{row['task'][0]}s: {row['way']}"
        counts.setdefault(name, Counter())[row["outcome"]] += 1
    refused = Counter(row["detail"] for row in rows if row["outcome"] == "refused")
    others = [row for row in rows if row["outcome"] not in ("equal", "refused")]
    for row in others:
        print(row)
    return {"counts": counts, "refused": dict(refused.most_common()), "others": others}


if __name__ == "__main__":
    main()
