"""What a search for kernels costs and saves: trainings with `--fusion auto` beside `off`, and choices of searches.

    python benchmarks/tuning.py [--steps 1000000000 100000000 10000000 1000000] [--num-envs 4096] [--num-steps 128]
        [--choices 20] [--warm] [--until 140] [--output FOLDER]

Each training is `rollmill train ppo CartPole-v1` in a process of its own, from its beginning to its end. `auto`
and `off` each begin with an empty cache, and are repeated with what they left there if `--warm` is given. Notes of
a training tell what its search took and about how many seconds it saves. Then the candidates of one training's
searches are timed over and over. No training begins after the seconds of `--until`. Writes
results/tuning-gpu.json or results/tuning-cpu.json, after each training.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from measure import HERE, Failed, options, platform, write_result

NOTES = ("nothing is fused", "not fused", "one kernel", "search for kernels")
"""Parts of the notes that tell of kernels."""


def training(fusion: str, steps: int, sizes: Sequence[str], cache: Path) -> dict[str, Any]:
    """Runs a training, and returns its seconds from the command to its end, and its notes on kernels."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["ppo", "CartPole-v1", "--fusion", fusion, "--total-timesteps", str(steps), *sizes]
        command = [sys.executable, "-m", "rollmill", "train", *words, "--run-dir", str(Path(folder, "run"))]
        sources = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"PYTHONPATH": sources, "ROLLMILL_CACHE_DIR": str(cache)}
        variables |= {"TRITON_CACHE_DIR": f"{cache}-triton"}
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=folder)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise Failed(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    lines = (done.stdout + done.stderr).splitlines()
    notes = [line for line in lines if any(part in line for part in NOTES)]
    times = {name: summary[name] for name in ("compile_seconds", "seconds", "steps_per_second")}
    return {"whole": seconds, **times, "notes": notes}


def trainings(
    steps: Sequence[int],
    sizes: Sequence[str],
    kinds: Sequence[str],
    folder: Path,
    until: float,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Trains with and without kernels for each number of steps, and compares the seconds of the whole."""
    found: dict[str, Any] = {}
    for count in steps:
        own: dict[str, Any] = {}
        for kind in kinds:
            for fusion in ("off", "auto"):
                if time.perf_counter() > until:
                    return found
                (folder / f"{fusion}-{count}").mkdir(exist_ok=True)
                trained = training(fusion, count, sizes, folder / f"{fusion}-{count}")
                print(f"{count:,} steps, {fusion}, {kind}: {json.dumps(trained)}", flush=True)
                own[f"{fusion}, {kind}"] = trained
                found[f"{count}"] = own
                keep(found)
            own[f"auto over off, {kind}"] = own[f"auto, {kind}"]["whole"] / own[f"off, {kind}"]["whole"]
            keep(found)
    return found


def choices(count: int, num_envs: int, num_steps: int, until: float) -> dict[str, Any]:
    """Times the candidates of both searches of a training again and again, and counts what was chosen.

    The searches have no limit. Each is timed with the candidates that were compiled once.
    """
    import jax

    import rollmill
    from rollmill.fusion.tune import timing
    from rollmill.programs import kernel_choice, tuning
    from rollmill.programs.compiled import unroll_for

    searches: list[tuple[Any, ...]] = []

    def noted(*search: Any) -> Any:
        searches.append(search)
        return timing.find_fastest_launch(*search)

    tuning.find_fastest_launch = noted  # the only one that Tuner calls
    graph = rollmill.ppo("CartPole-v1", num_envs=num_envs, num_steps=num_steps, total_timesteps=10**9)
    devices = jax.devices()[:1]
    settings = {"fusion": "auto", "numerics": "tf32", "unroll": unroll_for(devices[0].platform), "num_seeds": 1}
    kernel_choice.choose_kernels(graph, devices=devices, **settings)
    found = {}
    for number, (search, candidates, arguments, _, inputs, *_) in enumerate(searches):
        again = partial(chosen_by, search, candidates, arguments, inputs)
        found[f"{number}: {len(search.launches)} launches"] = again(count, until)
    print(f"choices in {count} searches: {json.dumps(found)}", flush=True)
    return found


def chosen_by(
    search: Any, candidates: Any, arguments: Any, inputs: Any, count: int, until: float
) -> dict[str, Any]:
    """Returns how often each launch was chosen in some searches, and the mean seconds of one."""
    import jax

    from rollmill.fusion.tune import timing

    search = search._replace(fused=cache(search.fused))  # each launch has one function, compiled once
    whole = cache(lambda function: jax.jit(function).lower(*search.shapes).compile())
    began, chosen = time.perf_counter(), Counter()
    for _ in range(count):
        if time.perf_counter() > until:
            break
        search.file.unlink(missing_ok=True)
        compile_whole = lambda function, shapes: whole(function)
        tuned = timing.find_fastest_launch(
            search, candidates, arguments, inputs=inputs, compile_whole=compile_whole
        )
        chosen[f"{tuple(tuned.launch)}, {'faster' if (tuned.speedup or 0) >= 1 else 'slower'}"] += 1
    return {"chosen": dict(chosen), "seconds": (time.perf_counter() - began) / max(1, chosen.total())}


def main() -> None:
    """Measures and writes the result."""
    began = time.perf_counter()
    chosen = options(
        __doc__,
        steps=[1_000_000_000, 100_000_000, 10_000_000, 1_000_000],
        num_envs=4096,
        num_steps=128,
        choices=20,
        warm=False,
        until=3600.0,
    )
    sizes = ["--num-envs", str(chosen.num_envs), "--num-steps", str(chosen.num_steps)]
    result: dict[str, Any] = {"sizes": sizes}
    until = began + chosen.until

    def keep(found: dict[str, Any]) -> None:
        result["trainings"] = found
        write_result(f"tuning-{platform()}", result, chosen.output)

    with tempfile.TemporaryDirectory() as folder:
        kinds = ("cold", "warm") if chosen.warm else ("cold",)
        trainings(chosen.steps, sizes, kinds, Path(folder), until, keep)
        if chosen.choices:
            os.environ["ROLLMILL_CACHE_DIR"] = str(Path(folder, "choices"))
            result["choices"] = choices(chosen.choices, chosen.num_envs, chosen.num_steps, until + 20)
            write_result(f"tuning-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
