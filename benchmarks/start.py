"""What a user waits for before the first iteration of a training in one process, and how fast it begins.

    python benchmarks/start.py [--algorithm ppo] [--environment CartPole-v1] [--repeats 5] [--source before=FOLDER]
        [--settings WORD ...] [--train-seconds 0] [--stacks] [--name start] [--output FOLDER]

Each start is `rollmill train` in a process of its own, from its beginning to the end of its first iteration: cold,
with an empty cache of compiled programs, and warm, with what the cold start left there. Bytecode of Python is
always there. `--source NAME=FOLDER` starts other sources as well (a folder `src`), in turns with these; a setting
such as `fusion=full` stands for `--fusion full`. Processor seconds are those of the whole process. One more start
of each kind has clocks in it. Its phases are wall-clock times: those with two spaces in front are parts of others,
and times of XLA overlap where it compiles in several threads. With `--stacks` the functions in which the main
thread was longest are there as well.

With `--train-seconds` one more training runs for so long, and its own metrics tell its steps per second in the
first ten seconds and later. Writes results/start-cpu.json.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, Failed, in_turns, options, platform, write_result

FIRST_SECONDS = 10.0


def variables(source: Path, cache: Path) -> dict[str, str]:
    """Returns the environment variables of a start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = cache.parent.parent / "bytecode"
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "ROLLMILL_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": f"{cache}-triton",
    }


def start(source: Path, cache: Path, words: list[str]) -> dict[str, float]:
    """Starts a training by the command, and returns its seconds until the first line of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ["--quiet", "--no-tensorboard", "--run-dir", str(run)]
        command = [sys.executable, "-m", "rollmill", "train", *words, *options]
        errors, metrics = Path(folder, "errors"), run / "metrics.jsonl"
        began = time.perf_counter()
        with (
            errors.open("w") as stderr,  # a pipe that nobody reads would fill
            subprocess.Popen(command, env=variables(source, cache), cwd=folder, stderr=stderr) as training,
        ):
            while not metrics.exists() or not metrics.stat().st_size:
                if training.poll() is not None:
                    raise Failed(f"{source}: exit code {training.returncode}\n{errors.read_text()[-2000:]}")
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            used = Path(f"/proc/{training.pid}/stat").read_text().rpartition(")")[2].split()
            training.kill()
    return {"seconds": seconds, "processor": sum(map(int, used[11:13])) / os.sysconf("SC_CLK_TCK")}


def phases(samples: bool, source: Path, cache: Path, words: list[str]) -> dict[str, Any]:
    """Starts a training with clocks in it, and returns the durations of its phases.

    Clocks replace functions. The process has the command's name, as only the command recalls digests.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = shutil.copy(HERE / "clocked_start.py", Path(folder, "rollmill"))
        began = [repr(time.time()), str(int(samples))]
        done = subprocess.run(
            [sys.executable, command, *began, *words, "--run-dir", str(Path(folder, "run"))],
            capture_output=True,
            text=True,
            check=False,
            env=variables(source, cache),
            cwd=folder,
        )
    if done.returncode:
        raise Failed(f"{source}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def both(
    function: Callable[[Path, Path, list[str]], dict[str, Any]],
    name: str,
    source: Path,
    folder: Path,
    words: list[str],
) -> dict[str, dict[str, Any]]:
    """Starts with an empty cache of compiled programs, and again."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        (Path(cache) / "programs").mkdir()
        found = {kind: function(source, Path(cache) / "programs", words) for kind in ("cold", "warm")}
    for kind, each in found.items():
        print(f"{name}, {kind}: {each['seconds']:.1f} s, {each['processor']:.1f} s of processors", flush=True)
    return found


def first_seconds(cache: Path, words: list[str], seconds: float) -> dict[str, float]:
    """Trains for some time, and returns the steps per second in the first ten seconds of its metrics and later."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rollmill", "train", *words, "--quiet", "--run-dir", f"{folder}/run"]
        training = subprocess.Popen(command, env=variables(HERE.parent / "src", cache), cwd=folder)
        lines, metrics = [], Path(folder, "run", "metrics.jsonl")
        while training.poll() is None and not (lines and json.loads(lines[-2])["seconds"] > seconds):
            time.sleep(1)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            lines = lines if len(lines) > 1 else []
        training.send_signal(signal.SIGTERM)
        training.wait(timeout=120)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    at = max((row for row in rows if row["seconds"] <= FIRST_SECONDS), key=lambda row: row["seconds"])
    last = rows[-1]
    first = at["env_steps"] / at["seconds"]
    later = (last["env_steps"] - at["env_steps"]) / (last["seconds"] - at["seconds"])
    return {"first": first, "later": later, "share": first / later, "seconds": last["seconds"]}


def medians(starts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the medians of the starts' durations, beside all of them."""
    return {
        "seconds": median(each["seconds"] for each in starts),
        "processor": median(each["processor"] for each in starts),
        "runs": [[each["seconds"], each["processor"]] for each in starts],
    }


def main() -> None:
    """Measures and writes the result."""
    chosen = options(
        __doc__,
        algorithm="ppo",
        environment="CartPole-v1",
        repeats=5,
        source=[[str]],
        settings=[str],
        train_seconds=0.0,
        stacks=False,
        name="start",
    )
    pairs = [pair.partition("=") for given in chosen.source or [] for pair in given]
    sources = {name: Path(folder).resolve() for name, _, folder in pairs}
    sources["now"] = HERE.parent / "src"
    given = [word for pair in chosen.settings or [] for word in f"--{pair}".split("=")]
    words = [chosen.algorithm, chosen.environment, *given]
    result: dict[str, Any] = {"words": words}
    with tempfile.TemporaryDirectory() as folder:
        if chosen.repeats:
            at = {name: (name, source, Path(folder), words) for name, source in sources.items()}
            runs = in_turns({name: partial(both, start, *at[name]) for name in at}, chosen.repeats, warm_up=1)
            for name, own in runs.items():
                result[name] = {kind: medians([each[kind] for each in own]) for kind in ("cold", "warm")}
                for kind, clocked in both(partial(phases, chosen.stacks), *at[name]).items():
                    result[name][kind]["with clocks"] = clocked
        if chosen.train_seconds:
            result["rates"] = first_seconds(Path(folder, "cache"), words, chosen.train_seconds)
            print(result["rates"], flush=True)
    write_result(f"{chosen.name}-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
