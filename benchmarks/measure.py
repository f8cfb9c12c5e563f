"""Parts that all benchmarks share: where one ran, and a JSON file that says so beside the figures."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jax

from rollmill.core.git import commit_of
from rollmill.core.machine import hardware, versions

RESULTS = Path(__file__).parent / "results"


def spread(values: list[float]) -> dict[str, float | list[float]]:
    """Median of several runs, with the runs themselves."""
    return {"median": median(values), "runs": values}


def write_result(name: str, result: dict, *, directory: Path = RESULTS) -> Path:
    """Writes `result` with hardware, versions, commit and time; returns the file."""
    provenance = {
        "command": " ".join(["python", *_command()]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": this_commit(),
        "versions": versions(),
        "hardware": hardware() | {"gpu": _gpu()},
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**provenance, "result": result}, indent=2) + "\n")
    print(f"wrote {path}")
    return path


def this_commit() -> str | None:
    """The commit of the sources, with `-dirty` if tracked files differ that are no results.

    Where the sources were copied without their repository, `$ROLLMILL_COMMIT` says it.
    """
    if given := os.environ.get("ROLLMILL_COMMIT"):
        return given
    commit = commit_of(RESULTS.parent)
    others = ["git", "diff", "--quiet", "HEAD", "--", ":(top)", ":(top,exclude)benchmarks/results"]
    if commit is None or subprocess.run(others, cwd=RESULTS.parent, check=False).returncode:
        return commit
    return commit.removesuffix("-dirty")


def rejax_figures(python: str, algorithm: str, settings: Mapping[str, Any], *, repeats: int) -> list[float]:
    """Steps per second of whole trainings by Rejax, in a Python of its own."""
    order = {"algorithm": algorithm, "settings": settings, "repeats": repeats}
    return _answer(python, "rejax_training.py", order)["figures"]


def rejax_curves(
    python: str, algorithm: str, settings: Mapping[str, Any], *, seeds: Sequence[int], episodes: int
) -> dict[str, Any]:
    """Learning curves of Rejax, in a Python of its own: `returns[seed][point]`, and `versions`."""
    order = {"algorithm": algorithm, "settings": settings, "seeds": seeds, "episodes": episodes}
    return _answer(python, "rejax_learning.py", order)


def _answer(python: str, script: str, order: Mapping[str, Any]) -> dict[str, Any]:
    command = [python, str(Path(__file__).parent / script), json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compiled(functions: Mapping[Any, Callable], arguments: Sequence[Any]) -> dict[Any, Callable]:
    """The functions compiled for these arguments, side by side; those that cannot be are reported and left out."""

    def build(item: tuple[Any, Callable]) -> tuple[Any, Callable | None]:
        name, function = item
        began = time.perf_counter()
        try:
            found = jax.jit(function).lower(*arguments).compile()
        except Exception as error:  # a launch that does not fit the chip is no fault of the others
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            found = None
        print(f"{time.perf_counter() - began:.1f} s to compile {name}", flush=True)
        return name, found

    with ThreadPoolExecutor(12) as pool:
        built = list(pool.map(build, functions.items()))
    return {name: function for name, function in built if function is not None}


def timed_in_turns(
    functions: Mapping[Any, Callable], arguments: Sequence[Any], *, repeats: int = 7, calls: int = 8
) -> dict[Any, list[float]]:
    """Seconds of a call of each function, several times, in turns; each time is that of several calls in a row."""
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(calls):
                found = function(*arguments)
            jax.block_until_ready(found)
            seconds[name].append((time.perf_counter() - began) / calls)
    return {name: times[1:] for name, times in seconds.items()}


def machine_of(hardware: Mapping[str, Any]) -> str:
    """The cores or GPUs that a result was measured on."""
    kinds = [device["kind"] for device in hardware["devices"]]
    return f"{hardware['cores']} cores" if kinds[0] == "cpu" else f"{len(kinds)} x {kinds[0]}"


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | None = None) -> str:
    """A table in Markdown; columns of numbers, by default all but the first, are aligned to the right."""
    right = range(1, len(head)) if numbers is None else numbers
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *escaped])


def write_table(table: str, path: Path, *, part: str = "") -> None:
    """Replaces what stands between this script's two markers on a page, or those of a part of its tables."""
    begin, end = f"<!-- table: benchmarks/{Path(sys.argv[0]).name}{part} -->", "<!-- end of table -->"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path} lacks the markers {begin!r} and {end!r}.")
    path.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
    print(f"wrote the table in {path}")


def _command() -> list[str]:
    """The command line, but for where it was told to write; of paths outside the project, the ends."""
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    words = ["/".join(Path(word).parts[-3:]) if Path(word).is_absolute() else word for word in words]
    return [f"benchmarks/{Path(sys.argv[0]).name}", *words]


def _gpu() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
