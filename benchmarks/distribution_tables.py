"""The tables of docs/distribution.md, from the results that the other scripts have written.

    python benchmarks/distribution_tables.py

Reads results/distribution-policies.json, distribution-rllib.json, channels-cpu.json, tag-cpu.json and
scaling-gpu.json; measures nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measure import RESULTS, table_of, write_table


def policies(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    columns = [row["figures"] for row in rows]

    def cell(column: dict[str, Any], name: str) -> str:
        if name not in column:
            return ""
        rates = {each: figure["steps_per_second"]["median"] for each, figure in column.items()}
        text = f"{rates[name] / 1e3:,.1f}"
        return f"**{text}**" if rates[name] == max(rates.values()) else text

    head = ["Thousand steps/s", *(f"{row['work']['algorithm']}, {row['environment']}" for row in rows)]
    return table_of(head, [[name, *(cell(column, name) for column in columns)] for name in names])


def rllib(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        rates = {name: figure["steps_per_second"]["median"] for name, figure in row["figures"].items()}
        for name in rates:
            if name != "rllib":
                work, ratio = row["work"], row["ratios"][name]
                own = [f"{work['algorithm']}, {name.removeprefix('rollmill ')}", row["chosen"][name]]
                found.append([*own, f"{rates[name]:,.0f}", f"{rates['rllib']:,.0f}", f"{ratio:.1f} x"])
    return table_of(["Algorithm, environment", "Rollmill's layout", "Rollmill", "RLlib", "Ratio"], found)


def channels(rows: list[dict[str, Any]]) -> str:
    sides = list(rows[0]["gigabytes_per_second"])
    head = ["GB/s", *(f"{row['bytes'] / 1024:,.0f} KiB" for row in rows)]
    rate = lambda row, side: f"{row['gigabytes_per_second'][side]['median']:.2f}"
    trips = list(rows[0]["round_trip_microseconds"])
    trip = lambda row, side: f"{row['round_trip_microseconds'][side]['median']:,.0f}"
    throughput = table_of(head, [[side, *(rate(row, side) for row in rows)] for side in sides])
    head = ["Round trip, microseconds", *head[1:]]
    return throughput + "\n\n" + table_of(head, [[side, *(trip(row, side) for row in rows)] for side in trips])


def tag(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        rates = {name: figure["median"] for name, figure in row["steps_per_second"].items()}
        peer = next(name for name in rates if name.startswith("WarpDrive"))
        best = max((name for name in rates if name != peer), key=lambda name: rates[name])
        where = f"{row['environment']}, {row['taggers']} taggers, {row['runners']} runners"
        found.append([where, f"{rates[best]:,.0f}", f"{rates[peer]:,.1f}", f"{rates[best] / rates[peer]:,.0f} x"])
    return table_of(["Environment steps/s", "Rollmill", "WarpDrive, NumPy", "Ratio"], found)


def scaling(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        rates = {name: figure["median"] for name, figure in row["steps_per_second"].items()}
        cells = [f"{rates[name] / 1e6:.1f} ({row['over_one_gpu'][name]:.2f} x)" for name in rates]
        found.append([f"{row['envs_per_gpu']:,}", *cells])
    return table_of(["Environments a GPU", *rows[0]["steps_per_second"]], found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args()
    read = lambda name: json.loads((options.results / f"{name}.json").read_text())["result"]
    parts = {
        "Every policy at the same work": policies(read("distribution-policies")["rows"]),
        "Beside RLlib 2.60, steps a second": rllib(read("distribution-rllib")["rows"]),
        "Packages between two processes": channels(read("channels-cpu")["rows"]),
        "Tag with random actions": tag(read("tag-cpu")["rows"]),
        "PPO on two H200, million steps a second": scaling(read("scaling-gpu")["weak_scaling"]),
    }
    text = "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items())
    write_table(text, options.docs / "distribution.md")


if __name__ == "__main__":
    main()
