"""What a user waits for before the first iteration of a training in one process.

    python benchmarks/start.py [--algorithm ppo] [--environment CartPole-v1] [--repeats 5] [--settings WORD ...]
        [--name start]

Each start is `rollmill train` in a process of its own, from its beginning to the end of its first iteration: cold,
with an empty cache of compiled programs, and warm, with what the cold start left there. Bytecode of Python is
always there. A setting such as `fusion=full` stands for `--fusion full`. Processor seconds are those of the whole
process. Writes results/start-cpu.json.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, Failed, options, platform, write_result


def variables(folder: Path, cache: Path) -> dict[str, str]:
    """Returns the environment variables of a start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "ROLLMILL_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": f"{cache}-triton",
    }


def start(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Starts a training by the command, and returns its seconds until the first line of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ["--quiet", "--no-tensorboard", "--run-dir", str(run)]
        command = [sys.executable, "-m", "rollmill", "train", *words, *options]
        errors, metrics = Path(folder, "errors"), run / "metrics.jsonl"
        began = time.perf_counter()
        with (
            errors.open("w") as stderr,  # a pipe that nobody reads would fill
            subprocess.Popen(command, env=environment, cwd=folder, stderr=stderr) as training,
        ):
            while not metrics.exists() or not metrics.stat().st_size:
                if training.poll() is not None:
                    raise Failed(f"exit code {training.returncode}\n{errors.read_text()[-2000:]}")
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            used = Path(f"/proc/{training.pid}/stat").read_text().rpartition(")")[2].split()
            training.kill()
    return {"seconds": seconds, "processor": sum(map(int, used[11:13])) / os.sysconf("SC_CLK_TCK")}


def cold_and_warm(words: Sequence[str], folder: Path) -> dict[str, dict[str, float]]:
    """Starts with an empty cache of compiled programs, and again."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = variables(folder, Path(cache))
        found = {kind: start(words, environment) for kind in ("cold", "warm")}
    for kind, each in found.items():
        print(f"{kind}: {each['seconds']:.1f} s, {each['processor']:.1f} s of processors", flush=True)
    return found


def medians(starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns the medians of the starts' durations, beside all of them."""
    return {
        "seconds": median(each["seconds"] for each in starts),
        "processor": median(each["processor"] for each in starts),
        "runs": [[each["seconds"], each["processor"]] for each in starts],
    }


def main() -> None:
    """Measures and writes the result."""
    chosen = options(__doc__, algorithm="ppo", environment="CartPole-v1", repeats=5, settings=[str], name="start")
    given = [word for pair in chosen.settings or [] for word in f"--{pair}".split("=")]
    words = [chosen.algorithm, chosen.environment, *given]
    with tempfile.TemporaryDirectory() as folder:
        runs = [cold_and_warm(words, Path(folder)) for _ in range(chosen.repeats + 1)][1:]
    result = {kind: medians([each[kind] for each in runs]) for kind in ("cold", "warm")}
    write_result(f"{chosen.name}-{platform()}", {"words": words, "now": result}, chosen.output)


if __name__ == "__main__":
    main()
