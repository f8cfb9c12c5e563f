"""The tables of docs/fusion.md, from the results that the other scripts have written.

    python benchmarks/fusion_tables.py

Reads the results of fusion_rollouts.py (fusion-rollouts.json, -cartpole, -classic, -tag, -tag-4096),
fusion_training.py (fusion-training-4096.json, -65536, fusion-gradients.json) and fusion.py (fusion-study.json);
measures nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measure import RESULTS, table_of, write_table


def beside_xla(found: dict[str, Any], sides: dict[str, str], ratio: str, *, unit: float) -> list[list[str]]:
    """A row for each case: XLA's rate, then the others' with how many times it they are."""
    rows = []
    for case, rates in found.items():
        cells = [f"{rates['xla']['median'] / unit:,.2f}"]
        for side in sides:
            mine = rates.get(side)
            cells.append("" if mine is None else f"{mine['median'] / unit:,.2f} ({mine[ratio]:.1f} x)")
        rows.append([case, *cells])
    return rows


def rollouts(results: list[dict[str, Any]]) -> str:
    """A row for each case; later results replace earlier ones."""
    sides = {"tf32": "tf32", "bfloat16": "bfloat16"}
    cases: dict[str, Any] = {}
    for result in results:
        cases |= {f"{case}, {gpu(result)}": found for case, found in result["result"]["rollouts"].items()}
    return table_of(
        ["Environment, copies", "XLA", *sides.values()], beside_xla(cases, sides, "over_xla", unit=1e9)
    )


def training(results: list[dict[str, Any]]) -> str:
    sides = {"rollout": "rollouts fused", "full, tf32": "both, tf32", "full, bfloat16": "both, bfloat16"}
    rows = []
    for result in results:
        cases = {f"{case}, {gpu(result)}": found for case, found in result["result"].items()}
        rows += beside_xla(cases, sides, "times_xla", unit=1e6)
    return table_of(["Environments x steps, torso", "XLA", *sides.values()], rows)


def errors(result: dict[str, Any]) -> str:
    rows = [
        [case, side, f"{figure['error']:.1e}"]
        for case, found in result["result"].items()
        for side, figure in found.items()
        if side != "xla, exact products"
    ]
    return table_of(["Samples, torso", "Products", "Greatest error"], rows)


SIDES = {
    "Gymnasium": "Gymnasium, one core",
    "PyTorch": "PyTorch",
    "PyTorch, CUDA graph": "PyTorch in CUDA graphs",
    "torch.compile": "torch.compile",
    "torch.compile, CUDA graph": "torch.compile in CUDA graphs",
    "XLA": "XLA",
    "kernel": "kernel",
}


def study(result: dict[str, Any]) -> str:
    """The tables of the study: rates by number of environments, and what multiplies what."""
    cases = [case for case in result["result"]["cases"] if case["sweep"] == "environments"]
    parts = [
        f"### {name}, million steps a second, {gpu(result)}\n\n{by_environments(cases, name)}"
        for name in dict.fromkeys(case["simulator"] for case in cases)
    ]
    title = f"### Times one environment unfused, {gpu(result)}"
    return "\n\n".join([*parts, f"{title}\n\n{multiplied(result['result']['multiplication'])}"])


def by_environments(cases: list[dict[str, Any]], simulator: str) -> str:
    """A row for each side, of its fastest variant."""
    sizes = sorted({case["num_envs"] for case in cases if case["simulator"] == simulator})
    best: dict[tuple[str, int], float] = {}
    for case in cases:
        if case["simulator"] == simulator:
            key = case["side"], case["num_envs"]
            best[key] = max(best.get(key, 0.0), case["median"])
    cell = lambda side, size: millions(best[side, size]) if (side, size) in best else ""
    rows = [[name, *(cell(side, size) for size in sizes)] for side, name in SIDES.items()]
    return table_of(["Environments", *(f"{size:,}" for size in sizes)], [row for row in rows if any(row[1:])])


def millions(rate: float) -> str:
    return f"{rate / 1e6:,.0f}" if rate >= 1e8 else f"{rate / 1e6:.3g}"


def multiplied(rows: list[dict[str, Any]]) -> str:
    parts = ("vectorised", "fused", "product", "both")
    return table_of(
        ["Simulator, environments, sides", "vectorised alone", "fused alone", "their product", "both"],
        [
            [f"{row['simulator']}, {row['num_envs']:,}, {row['sides']}", *(f"{row[part]:,.1f}" for part in parts)]
            for row in rows
            if row["num_envs"] > 1
        ],
    )


def gpu(result: dict[str, Any]) -> str:
    return (result["hardware"]["gpu"] or "CPU").split(",")[0].removeprefix("NVIDIA ").split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args()
    read = lambda *names: [json.loads((options.results / f"fusion-{name}.json").read_text()) for name in names]
    parts = {
        "Rollouts of 128 steps, trajectory stored, billion steps a second": rollouts(
            read("rollouts-classic", "rollouts-cartpole", "rollouts", "rollouts-tag", "rollouts-tag-4096")
        ),
        "PPO on CartPole-v1, 4 epochs of 4 minibatches, million steps a second": training(
            read("training-4096", "training-65536")
        ),
        "Gradients beside those with exact products, by the greatest number of each leaf": errors(
            read("gradients")[0]
        ),
    }
    text = "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items())
    write_table(text, options.docs / "fusion.md")
    figure = "![Rates over environments, steps of a launch, and complexity](figures/fusion-study.png)"
    write_table("\n\n".join([figure, study(*read("study"))]), options.docs / "fusion.md", part=", the study")


if __name__ == "__main__":
    main()
