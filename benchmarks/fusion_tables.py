"""The tables of docs/fusion.md, from the results that the other scripts have written.

    python benchmarks/fusion_tables.py

Reads results/fusion-rollouts.json, fusion-rollouts-classic.json, fusion-training.json, fusion-training-4096.json
and fusion-gradients.json; measures nothing.
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
    sides = {"tf32": "tf32", "bfloat16": "bfloat16"}
    rows = []
    for result in results:
        cases = {f"{case}, {gpu(result)}": found for case, found in result["result"]["rollouts"].items()}
        rows += beside_xla(cases, sides, "over_xla", unit=1e9)
    return table_of(["Environment, copies", "XLA", *sides.values()], rows)


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


def gpu(result: dict[str, Any]) -> str:
    return result["hardware"]["gpu"].split(",")[0].removeprefix("NVIDIA ").split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args()
    read = lambda *names: [json.loads((options.results / f"fusion-{name}.json").read_text()) for name in names]
    parts = {
        "Rollouts of 128 steps, trajectory stored, billion steps a second": rollouts(
            read("rollouts", "rollouts-classic")
        ),
        "PPO on CartPole-v1, 4 epochs of 4 minibatches, million steps a second": training(
            read("training", "training-4096")
        ),
        "Gradients beside those with exact products, by the greatest number of each leaf": errors(
            read("gradients")[0]
        ),
    }
    text = "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items())
    write_table(text, options.docs / "fusion.md")


if __name__ == "__main__":
    main()
