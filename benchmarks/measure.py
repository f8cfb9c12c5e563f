"""Harness of all benchmarks: options, sides in turns, commands in processes of their own, and results.

A script names its cases as data, runs both sides of a comparison in one process, in turns, and writes medians with
all runs to benchmarks/results, beside the hardware, the versions and the commit. `tables.py` and `figures.py` make
the tables and figures of the documentation from these files.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from rollmill.core.git import commit_of
from rollmill.core.machine import hardware, versions

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REJAX = "a Python with rejax==0.1.3 and gymnax==0.0.9"


class Choices(NamedTuple):
    """Value of an option that is one of these, or several of them."""

    values: tuple[Any, ...]
    default: Any
    several: bool


def one_of(*values: Any, default: Any = None) -> Choices:
    """Returns an option that takes one of the values; None by default, or `default`."""
    return Choices(values, default, several=False)


def some_of(values: Iterable[Any], default: Sequence[Any] | None = None) -> Choices:
    """Returns an option that takes several of the values; all by default, or `default`."""
    every = tuple(values)
    return Choices(every, list(every if default is None else default), several=True)


def options(doc: str | None, positional: Mapping[str, Any] | None = None, **named: Any) -> argparse.Namespace:
    """Parses the command line of a script, which always has `--output`, the folder of the result.

    The default of an option says what it takes: a number, text or path, several of them for a list, a flag for
    False. A type stands for an option without a default. A pair adds a help text to either.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (positional or {}).items():
        settings = _settings_of(value)
        if settings.get("nargs"):
            settings["nargs"] = "*" if settings["default"] else "+"
            # argparse would look for the whole default among the choices.
            settings["help"] = f"{settings['help'] or ''} of {', '.join(map(str, settings.pop('choices', ())))}"
        parser.add_argument(name, **settings)
    for name, value in named.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_settings_of(value))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    chosen = parser.parse_args()
    for name, value in (positional or {}).items():
        if (
            isinstance(value, Choices)
            and value.several
            and (unknown := {*getattr(chosen, name)} - {*value.values})
        ):
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(value.values)}")
    return chosen


def _settings_of(given: Any) -> dict[str, Any]:
    value, text = given if isinstance(given, tuple) and not isinstance(given, Choices) else (given, None)
    if isinstance(value, Choices):
        kind = {"choices": value.values, "default": value.default, "type": type(value.values[0])}
        return kind | {"help": text} | ({"nargs": "+"} if value.several else {})
    if isinstance(value, bool):
        flag = argparse.BooleanOptionalAction if value else "store_true"
        return {"action": flag, "default": value, "help": text}
    if isinstance(value, list) and isinstance(value[0], list):
        return {"nargs": "+", "type": value[0][0], "action": "append", "help": text}
    if isinstance(value, list):
        (first, *_), empty = value, isinstance(value[0], type)
        kind = first if empty else type(first)
        return {"nargs": "*", "type": kind, "default": None if empty else value, "help": text}
    if isinstance(value, type):
        return {"type": value, "default": None, "help": text}
    return {"type": type(value), "default": value, "help": text}


def platform() -> str:
    """Returns `cpu` or `gpu`: the devices on which this process computes."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def require(machine: str) -> None:
    """Exits unless this process computes on `machine`."""
    if jax.default_backend() != machine:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, not on {machine}.")


# --- results ---------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns the median of several runs, beside all of them."""
    return {"median": median(values), "runs": list(values)}


def spreads(runs: Mapping[Any, Sequence[float]]) -> dict[Any, dict[str, Any]]:
    """Returns the spread of each side."""
    return {name: spread(each) for name, each in runs.items()}


def ratios(figures: Mapping[str, Mapping[str, Any]], side: str) -> dict[str, float]:
    """Returns how many times the median of each other side that of `side` is."""
    medians = {name: figure["median"] for name, figure in figures.items()}
    return {f"{side} / {name}": medians[side] / each for name, each in medians.items() if name != side}


def interquartile_mean(values: Any) -> float:
    """Returns the mean of the values without the lowest and the highest quarter of them, each rounded down."""
    ordered = np.sort(np.ravel(values))
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def stratified_interval(groups: Sequence[Sequence[float]], *, draws: int = 2_000) -> tuple[float, float]:
    """Returns an interval of 95 % for the interquartile mean of all values, by bootstrap.

    Values are drawn anew within each group alone, such as the seeds of an environment (Agarwal et al. 2021).
    """
    generator = np.random.default_rng(0)
    drawn = [generator.choice(np.asarray(group), (draws, len(group))) for group in groups]
    means = [interquartile_mean(values) for values in np.concatenate(drawn, axis=1)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def read_result(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the result that a script has written, without its origin; empty if there is none."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["result"] if file.exists() else {}


def merged_results(names: Sequence[str], folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the results of several processes as one: a later one adds to each case, and replaces what it has."""
    table: dict[str, Any] = {}
    for name in names:
        for case, row in read_result(name, folder).items():
            sides = table.setdefault(case, {})
            for side, found in row.items():
                sides[side] = {**sides.get(side, {}), **found} if isinstance(found, dict) else found
    return table


def write_result(
    name: str, result: Mapping[str, Any], directory: Path = RESULTS, *, measured_with: str | None = None
) -> None:
    """Writes a result with the command, the time, the commit, the versions and the hardware.

    Commit, versions and hardware are those of the result `measured_with`, if it is named.
    """
    origin = {
        "command": " ".join(["python", *_command()]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": this_commit(),
        "versions": versions(),
        "hardware": hardware() | {"gpu": gpu_name()},
    }
    if measured_with is not None:
        other = json.loads((directory / f"{measured_with}.json").read_text())
        origin |= {key: other[key] for key in ("commit", "versions", "hardware")}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**origin, "result": result}, indent=2) + "\n")
    print(f"wrote {path}")


def this_commit() -> str | None:
    """Returns the commit of the sources, with `-dirty` if tracked files other than results differ.

    Where the sources were copied without their repository, `$ROLLMILL_COMMIT` names it.
    """
    if named := os.environ.get("ROLLMILL_COMMIT"):
        return named
    commit = commit_of(HERE)
    others = ["git", "diff", "--quiet", "HEAD", "--", ":(top)", ":(top,exclude)benchmarks/results"]
    if commit is None or subprocess.run(others, cwd=HERE, check=False).returncode:
        return commit
    return commit.removesuffix("-dirty")


def _command() -> list[str]:
    """Returns the command line without `--output`; of paths outside the project only the ends."""
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    words = ["/".join(Path(word).parts[-3:]) if Path(word).is_absolute() else word for word in words]
    return [f"benchmarks/{Path(sys.argv[0]).name}", *words]


def gpu_name() -> str | None:
    """Returns the name and the driver of this machine's GPUs, None without any."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# --- sides in turns --------------------------------------------------------------------------------------


def in_turns(sides: Mapping[Any, Callable[[], Any]], rounds: int, *, warm_up: int = 0) -> dict[Any, list[Any]]:
    """Runs all sides in each round, so that a machine whose speed drifts slows all of them alike.

    Returns the results of each side without those of the first `warm_up` rounds. Odd rounds run in reverse.
    """
    found: dict[Any, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + warm_up):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(sides[name]())
    return {name: each[warm_up:] for name, each in found.items()}


def check_equal_work(work: Mapping[str, Any], expected: Any = None) -> None:
    """Exits if a side has done other work than the others, or than `expected`."""
    wanted = next(iter(work.values())) if expected is None else expected
    if any(each != wanted for each in work.values()):
        raise SystemExit(f"the sides have done different work: {dict(work)}, expected {wanted}.")


def compiled(functions: Mapping[Any, Callable], arguments: Sequence[Any]) -> dict[Any, Callable]:
    """Compiles the functions for these arguments, side by side; prints and leaves out those that cannot be."""

    def build(item: tuple[Any, Callable]) -> tuple[Any, Callable | None]:
        name, function = item
        began, program = time.perf_counter(), None
        try:
            program = jax.jit(function).lower(*arguments).compile()
        except Exception as error:  # a launch that does not fit the chip must not stop the others
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        print(f"{time.perf_counter() - began:.1f} s to compile {name}", flush=True)
        return name, program

    with ThreadPoolExecutor(12) as pool:
        built = list(pool.map(build, functions.items()))
    return {name: function for name, function in built if function is not None}


def timed_in_turns(
    functions: Mapping[Any, Callable], arguments: Sequence[Any], *, repeats: int = 7, calls: int = 8
) -> dict[Any, list[float]]:
    """Returns the seconds of a call of each function, several times, in turns, as means of `calls` calls."""

    def seconds_of(function: Callable) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            found = function(*arguments)
        jax.block_until_ready(found)
        return (time.perf_counter() - began) / calls

    sides = {name: lambda function=function: seconds_of(function) for name, function in functions.items()}
    return in_turns(sides, repeats, warm_up=1)


def fastest(side: str, seconds: Mapping[tuple[str, Any], Sequence[float]], steps: int) -> dict[str, Any]:
    """Returns the steps a second of the fastest variant of a side, and the medians of all its variants."""
    rates = {
        variant: spread([steps / s for s in each]) for (name, variant), each in seconds.items() if name == side
    }
    if not rates:
        raise SystemExit(f"no variant of {side} compiles here.")
    best = max(rates, key=lambda variant: rates[variant]["median"])
    medians = {str(variant): rate["median"] for variant, rate in rates.items()}
    return rates[best] | {"variant": best, "medians": medians}


def advance(program: Any, state: Any, first: int, until: int, **how: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Trains a compiled program from one iteration to another; returns its state and the metrics of each."""
    from rollmill.programs.dispatch import dispatch_ahead

    rows: list[dict[str, Any]] = []
    for window in dispatch_ahead(program, state, first=first, until=until, **how):
        state = window.after
        rows += window.metrics
    return jax.block_until_ready(state), rows


def training_turns(program: Any, batch: int, iterations: int, **how: Any) -> Callable[[], float]:
    """Returns a function that trains some more iterations, and returns their environment steps a second."""
    state, first = program.start(), 0

    def turn() -> float:
        nonlocal state, first
        began = time.perf_counter()
        state, _ = advance(program, state, first, first + iterations, **how)
        first += iterations
        return iterations * batch / (time.perf_counter() - began)

    return turn


def marks(iterations: int, points: int) -> list[int]:
    """Returns iterations that divide a training into `points` equal parts, from 0 on."""
    return sorted({round(iterations * point / points) for point in range(points + 1)})


# --- commands --------------------------------------------------------------------------------------------


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Waits for the lock of a file or folder, and holds it in the context; None stands for no lock."""
    handle = os.open(lock or os.devnull, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if lock else fcntl.LOCK_UN)
        yield
    finally:
        os.close(handle)


class Failed(Exception):
    """A command ended with an error, or made no progress."""


def words(text: str, **options: Any) -> list[str]:
    """Returns the words of a command line: `num_envs=4` adds `--num-envs 4`, and a list several values."""
    found = text.split()
    for name, value in options.items():
        found += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return found


def rollmill(*command: Any, **options: Any) -> str:
    """Runs `rollmill` in a process of its own and returns its output; raises `Failed` if it fails."""
    line = [sys.executable, "-m", "rollmill", *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise Failed(
            f"{' '.join(line)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def foreign(python: str, script: str, order: Any, **options: Any) -> Any:
    """Runs a script of this folder in another Python; returns the JSON object that it prints last."""
    command = [python, str(HERE / script), json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a run's metrics; none before the first."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def count_lines(run: Path) -> int:
    """Returns the number of whole lines of a run's metrics without reading them, for loops that poll."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def summary_of(run: Path) -> dict[str, Any]:
    """Returns the summary of a run; empty before its end."""
    file = run / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def rate(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """Returns the environment steps a second between two lines of metrics."""
    if last["seconds"] <= first["seconds"]:
        raise Failed("no iteration ended while the clock ran; give it more time.")
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])
