"""Every algorithm with kernels under every placement: equal to XLA, refused, or wrong.

    python benchmarks/fusion_product.py [ALGORITHMS] [--places PLACES] [--depths DEPTHS] [--resumes] [--add]
    python benchmarks/fusion_product.py --parts NAMES

A cell of the table is a short training. A depth of fusion is *equal* where all weights agree with those by XLA,
within 1e-4 of a number and 1e-5, and all kernels that were sought are there. They are compared with one program by
XLA, whose weights all placements give but for rounding, and where they differ, or of several seeds, with the same
placement by XLA. It is *refused* where it ends with an error that says what to do, and that works. Everything else
is *wrong*. The result is written after each cell, with the machine that computed it, and `--add` goes on with the
one that is there. Cells of a GPU have columns of their own. With `--resumes` each training with kernels is also
resumed from a copy of its run as a kill halfway leaves it, and has to end with the same bits. On a GPU each kernel
has one launch, and none is sought, because nothing is timed. `--parts` makes one result of several,
so that rows can be computed side by side.
"""

import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import merged_results, options, platform, read_result, some_of, write_result

import rollmill
from rollmill.core.errors import UsageError
from rollmill.core.machine import usable_cores
from rollmill.dataflow import Graph
from rollmill.fusion.backends.triton import launches
from rollmill.policies.loading import load_weights
from rollmill.programs.kernels import kernel_parts, sought_parts
from rollmill.record.run_directory import RunDirectory
from rollmill.training.placing import choose_plan

ENVS, STEPS, ITERATIONS = 8, 8, 10
SIZES = {"num_envs": ENVS, "num_steps": STEPS, "total_timesteps": ENVS * STEPS * ITERATIONS}
MLP = rollmill.NetworkConfig(hidden_sizes=(16,))
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(8,), recurrent_size=8)
MINIBATCHES = {"num_minibatches": 2, "update_epochs": 2}
REPLAY = {"batch_size": 32, "learning_starts": 128, "buffer_size": 1_600, "gradient_steps": 3}
ALGORITHMS: dict[str, tuple[Callable[..., Graph], str, dict[str, Any]]] = {
    "ppo": (rollmill.ppo, "CartPole-v1", MINIBATCHES),
    "ppo-gru": (rollmill.ppo, "CartPole-v1", {**MINIBATCHES, "network": GRU}),
    "ppo-lstm": (rollmill.ppo, "CartPole-v1", {**MINIBATCHES, "network": LSTM}),
    "a3c": (rollmill.a3c, "CartPole-v1", {}),
    "impala": (rollmill.impala, "CartPole-v1", {"num_minibatches": 2}),
    "mappo": (rollmill.mappo, "TagGridWorld-Small-v0", MINIBATCHES),
    "ippo": (rollmill.ippo, "TagGridWorld-Small-v0", MINIBATCHES),
    "dqn": (rollmill.dqn, "CartPole-v1", REPLAY),
    "sac": (rollmill.sac, "Pendulum-v1", REPLAY),
    "td3": (rollmill.td3, "Pendulum-v1", REPLAY),
}
PLACES: dict[str, dict[str, Any]] = {
    "one program": {"place": "program"},
    "two devices": {"place": "program", "devices": 2},
    "single-learner-coarse": {"place": "threads", "distribution": "single-learner-coarse", "actors": 2},
    "multi-learner": {"place": "threads", "distribution": "multi-learner", "learners": 2},
    "central": {"place": "threads", "distribution": "central", "actors": 2},
    "mesh": {"place": "mesh", "learners": 2},
    "4 seeds": {"place": "program", "num_seeds": 4},
}
ALONE = "one program"
DEPTHS = ("off", "rollout", "full")
SHARDS = 4
ON_GPU = ", one GPU"
"""End of the columns of cells that a GPU has computed."""
HALF = ITERATIONS // 2
KEPT = {"checkpoint_iterations": HALF, "keep_last": ITERATIONS}
"""Options of a run that can be resumed from its middle."""
RTOL, ATOL = 1e-4, 1e-5
OPTIONS = {"tensorboard": False, "quiet": True, "seed": 3}
QUICKLY_COMPILED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""Nothing is timed, and compiling is most of the time. Kernels are not compiled by XLA."""
ADVISED = {"fusion", "place", "distribution", "num_seeds", "devices"}
CANDIDATES = ("ROLLOUTS", "LONG_ROLLOUTS", "EXACT_ROLLOUTS", "GRADIENTS", "FEW_SAMPLES", "SEQUENCES")
"""Lists of the launches that a GPU's backend chooses from."""


def leave_one_launch() -> None:
    """Leaves the first launch of each kind of kernel, so that none is compiled only to be timed."""
    for name in CANDIDATES:
        setattr(launches, name, getattr(launches, name)[:1])


def graph_of(algorithm: str) -> Graph:
    make, environment, settings = ALGORITHMS[algorithm]
    return make(environment, **{**SIZES, "num_shards": SHARDS, "network": MLP, **settings})


def trained(graph: Graph, folder: Path, chosen: Mapping[str, Any]) -> list[Any]:
    """Returns the weights of each seed."""
    rollmill.train(graph, run_dir=folder, **chosen, **OPTIONS)
    return weights_of(folder, chosen)


def weights_of(folder: Path, chosen: Mapping[str, Any]) -> list[Any]:
    """Returns the weights of each seed of a run."""
    seeds = range(OPTIONS["seed"], OPTIONS["seed"] + chosen.get("num_seeds", 1))
    return [load_weights(folder, seed=seed).weights for seed in seeds]


def killed_midway(folder: Path, into: Path) -> Path:
    """Returns a copy of a run, or of the runs of its seeds, as a kill leaves it before its last checkpoint."""
    shutil.copytree(folder, into)
    for last in into.rglob(f"checkpoints/{ITERATIONS}"):
        shutil.rmtree(last)
    for summary in into.rglob("summary.json"):
        summary.unlink()
    return into


def resumes_alike(folder: Path, chosen: Mapping[str, Any]) -> bool:
    """Returns whether a run that was killed midway ends with the same bits."""
    killed = killed_midway(folder, folder.with_name("killed"))
    rollmill.resume(killed, quiet=True)
    leaves = [jax.tree.leaves(weights_of(run, chosen)) for run in (killed, folder)]
    return all(np.array_equal(mine, right) for mine, right in zip(*leaves, strict=True))


def machine_here() -> str:
    """Returns the device that computes a cell."""
    return f"{usable_cores()} cores" if platform() == "cpu" else jax.devices()[0].device_kind


def difference(mine: list[Any], right: list[Any]) -> float:
    """Returns the greatest difference of a number, in units of what is allowed."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    found = [np.abs(a - b) / (ATOL + RTOL * np.abs(b)) for a, b in pairs if np.issubdtype(b.dtype, np.floating)]
    return max(float(each.max(initial=0.0)) for each in found)


def missing_kernels(graph: Graph, folder: Path, chosen: Mapping[str, Any]) -> list[str]:
    """Returns the parts that were sought as kernels and are none, with the group that they belong to."""
    launches = RunDirectory.open(folder).read_config()["launches"] or {}
    partition = choose_plan(graph, rollmill.RunOptions(**chosen)).partition
    groups = launches.get("groups") or {group.name: launches for group in partition.groups}
    return [
        f"{part} of {group.name}"
        for group in partition.groups
        for part in kernel_parts(group)
        if part in sought_parts(chosen["fusion"]) and not (groups.get(group.name) or {}).get(part)
    ]


def ways_out(sentence: str, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Returns the options of everything that a refusal advises."""
    for hint in re.split(r"\n\s*hint: |; ", sentence)[1:] + re.findall(r"auto trains without", sentence):
        if hint == "auto trains without":
            yield {**chosen, "fusion": "auto"}
        for name, value in re.findall(r"\b(\w+)=([\w-]+)", hint):
            if name in ADVISED and str(chosen.get(name)) != value:  # else the hint names what was asked for
                changed = {**chosen, name: int(value) if value.isdigit() else value}
                left_out = re.findall(r"without --(\w+)", hint) + ["place"] * (value == "gpu-only")
                yield {key: each for key, each in changed.items() if key not in left_out}
        if (name := re.search(r"leave (\w+) out", hint)) and name[1] in chosen:
            yield {key: value for key, value in chosen.items() if key != name[1]}


def followed(graph: Graph, folder: Path, sentence: str, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns how a training ends with each advice of a refusal."""
    ends = {}
    for n, way in enumerate(ways_out(sentence, chosen)):
        name = ", ".join(f"{key}={value}" for key, value in way.items() if chosen.get(key) != value)
        name = name or ", ".join(f"without {key}" for key in chosen if key not in way)
        try:
            trained(graph, folder / f"advised-{n}", way)
            ends[name] = "works"
        except Exception as failure:
            ends[name] = f"{type(failure).__name__}: {failure}"
    return ends


class References:
    """Weights by XLA that those of kernels are compared with."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._weights: dict[str, list[Any]] = {}

    def of(self, place: str) -> list[Any]:
        """Returns the weights of each seed under a placement."""
        if place not in self._weights:
            with tempfile.TemporaryDirectory(prefix="rollmill-product-") as folder:
                self._weights[place] = trained(
                    self._graph, Path(folder) / "run", {**PLACES[place], "fusion": "off"}
                )
        return self._weights[place]

    def compared(self, place: str, weights: list[Any]) -> tuple[str, float]:
        """Returns the placement by XLA whose weights these are, with the difference, or else the same one."""
        apart = math.inf if "num_seeds" in PLACES[place] else difference(weights, self.of(ALONE))
        return (ALONE, apart) if apart <= 1 else (place, difference(weights, self.of(place)))


def cell_of(
    graph: Graph, folder: Path, place: str, depth: str, references: References, *, resumes: bool
) -> dict[str, Any]:
    """Returns a cell of the table."""
    chosen = {**PLACES[place], "fusion": depth}
    if depth != "off" and platform() == "gpu":
        chosen["numerics"] = "float32"
    try:
        weights = trained(graph, folder / "run", {**chosen, **(KEPT if resumes else {})})
    except UsageError as refusal:
        sentence = str(refusal)
        advice = followed(graph, folder, sentence, chosen)
        works = bool(advice) and all(end == "works" for end in advice.values())
        return {"outcome": "refused" if works else "wrong", "sentence": sentence, "advice": advice}
    except Exception as failure:
        return {"outcome": "wrong", "sentence": f"{type(failure).__name__}: {failure}"}
    missing, (by, apart) = missing_kernels(graph, folder / "run", chosen), references.compared(place, weights)
    found = {"outcome": "equal", "difference": apart, "xla": by}
    if missing:
        found["missing"] = missing
    if resumes:
        found["resumed"] = resumes_alike(folder / "run", chosen)
    if missing or not apart <= 1 or not found.get("resumed", True):
        found["outcome"] = "wrong"
    return found


def row_of(
    graph: Graph, places: Mapping[str, list[str]], *, resumes: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Returns the cells of one algorithm under its placements and depths, as they come."""
    references = References(graph)
    for place, depth in ((place, depth) for place, depths in places.items() for depth in depths):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="rollmill-product-") as folder:
            found = cell_of(graph, Path(folder), place, depth, references, resumes=resumes)
        yield place, depth, {**found, "seconds": round(time.perf_counter() - began, 1), "machine": machine_here()}


def in_order(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table with its rows and columns in the order of this script."""
    columns = [*PLACES, *(f"{place}{ON_GPU}" for place in PLACES)]
    return {
        algorithm: {place: table[algorithm][place] for place in columns if place in table[algorithm]}
        for algorithm in ALGORITHMS
        if algorithm in table
    }


def main() -> None:
    chosen = options(
        __doc__,
        {"algorithms": some_of(ALGORITHMS)},
        places=some_of(PLACES),
        depths=some_of(DEPTHS),
        resumes=(False, "resume each training with kernels from its middle"),
        add=False,
        parts=([str], "other results, which become this one"),
        name=("fusion-product", "of the result"),
    )
    os.environ.setdefault("XLA_FLAGS", QUICKLY_COMPILED)  # read by the first program; workers inherit it
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_default_matmul_precision", "highest")  # of XLA on a GPU
    table: dict[str, Any] = read_result(chosen.name, chosen.output) if chosen.add else {}
    if chosen.parts:
        merged = in_order(merged_results(chosen.parts, chosen.output))
        write_result(chosen.name, merged, chosen.output, measured_with=chosen.parts[-1])
        return
    end = ON_GPU if platform() == "gpu" else ""
    if end:
        leave_one_launch()
    for algorithm in chosen.algorithms:
        row = table.setdefault(algorithm, {})
        missing = {
            place: [n for n in chosen.depths if n not in row.get(f"{place}{end}", {})] for place in chosen.places
        }
        for place, depth, cell in row_of(graph_of(algorithm), missing, resumes=chosen.resumes):
            row.setdefault(f"{place}{end}", {})[depth] = cell
            print(algorithm, place, depth, cell, flush=True)
            write_result(chosen.name, in_order(table), chosen.output)


if __name__ == "__main__":
    main()
