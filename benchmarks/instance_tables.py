"""The tables of docs/instances.md, from results of instances.py, sweeps.py, instance_training.py and
reductions.py.

    python benchmarks/instance_tables.py

Measures nothing.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, table_of, write_table

PAGE = Path(__file__).parent.parent / "docs" / "instances.md"
REDUCTIONS = ("reductions-one-shot", "reductions-gpu", "reductions-four-gpu")
WAYS = {"turns": "in turns", "mps": "under MPS"}


def result_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def trainings(result: Mapping[str, Any]) -> str:
    """Steps a second in all, by program: of several processes and of one with as much work."""
    names = list(result["programs"])
    counts = list(result["mps"][names[0]])
    most = counts[-1]
    head = ["training", f"{counts[0]} process"]
    head += [f"{count} {WAYS[way]}" for count in counts[1:] for way in WAYS]
    head += [f"one of {most} times the environments", f"`vmap` of {most} trainings"]
    rows = []
    for name in names:
        shared = [result[way][name][count] for count in counts[1:] for way in WAYS]
        alone = [result["one process"].get(f"{name}, {kind}, {most}") for kind in ("wide", "vmap")]
        rows.append([name, *map(rate, [result["turns"][name][counts[0]], *shared, *alone])])
    return table_of(head, rows)


def rate(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "–"
    steps = figures["steps_per_second"]["median"]
    return f"{steps / 1e6:.3g} M" if steps >= 1e6 else f"{steps / 1e3:.3g} k"


def searches(result: Mapping[str, Any]) -> str:
    """AlphaZero: moves a second, relative to one process, beside what the GPU does meanwhile."""
    (name,) = result["programs"]
    one = result["turns"][name]["1"]
    rows = [
        row_of(f"{count} {'process' if count == '1' else 'processes, ' + words}", result[way][name][count], one)
        for way, words in WAYS.items()
        for count in result[way][name]
        if count != "1" or way == "turns"
    ]
    most = list(result["mps"][name])[-1]
    kinds = {"wide": f"one process, {most} times the games", "vmap": f"one process, `vmap` of {most} trainings"}
    alone = result["one process"]
    rows += [row_of(words, alone[f"{name}, {kind}, {most}"], one) for kind, words in kinds.items()]
    head = ["", "moves/s", "over one process", "utilisation (NVML)", "SM activity (GPM)", "SM occupancy", "memory"]
    return table_of(head, rows)


def row_of(name: str, figures: Mapping[str, Any], one: Mapping[str, Any]) -> list[str]:
    steps = figures["steps_per_second"]["median"]
    shares = [f"{100 * figures[key]:.1f} %" for key in ("utilisation", "sm_activity", "sm_occupancy")]
    over = f"{steps / one['steps_per_second']['median']:.2f}"
    return [name, f"{steps:,.0f}", over, *shares, f"{figures['memory_bytes'] / 2**30:.1f} GiB"]


def sweeps(result: Mapping[str, Any]) -> str:
    """Seconds of sweeps."""
    (found,) = result["rounds"]
    one = found["one after the other"]
    trials = found["side by side"]["trials"]
    seconds = {
        f"one after the other ({one['trials']} trials run, times {trials / one['trials']:g})": one["seconds"]
        * trials
        / one["trials"],
        "16 at a time, in turns": found["in turns"]["seconds"],
        "`rollmill sweep` as it is: 16 at a time under MPS": found["side by side"]["seconds"],
    }
    best = min(seconds.values())
    rows = [[name, f"{value:.0f} s", f"{value / best:.1f}"] for name, value in seconds.items()]
    return table_of([f"{trials} trials", "time", "over the fastest"], rows)


def placements(result: Mapping[str, Any]) -> str:
    """One training, placed in several ways: how far its weights are from those of one process."""
    rows = [[name, f"{row['largest_difference']:.1e}"] for name, row in result["rows"].items()]
    return table_of(["where", "largest difference of a weight"], rows)


def reductions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times of means by the number of parameters, and the way that a training chooses."""
    ways = ("flat", "one-shot", "hierarchical", "host")
    cells = [
        [f"{row['gpus']} x {row['instances']}", f"{row['parameters']:,}"]
        + [microseconds(row["seconds"][way]) if way in row["seconds"] else "" for way in ways]
        + [row["chosen"]]
        for row in rows
    ]
    return table_of(["GPUs x processes on each", "parameters", *ways, "chosen"], cells)


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us"


def main() -> None:
    write_table(trainings(result_of("instances-ppo")), PAGE, part=" ppo")
    write_table(searches(result_of("instances-alphazero")), PAGE, part=" alphazero")
    write_table(sweeps(result_of("sweeps-gpu")), PAGE, part=" sweeps")
    means = [row for name in REDUCTIONS for row in result_of(name)["rows"]]
    write_table(reductions(means), PAGE, part=" reductions")
    write_table(placements(result_of("instance-training-weights-gpu")), PAGE, part=" placements")


if __name__ == "__main__":
    main()
