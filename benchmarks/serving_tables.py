"""The tables of docs/serving.md, from results/serving-cpu.json, serving-gpu.json and serving-workers-gpu.json.

python benchmarks/serving_tables.py
"""

import json
from pathlib import Path

from measure import RESULTS, table_of, write_table

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
HEAD = ("load", "setting", "decisions a second", "median", "99th percentile")


def row(load: str, setting: str, figures: dict) -> list[str]:
    median, tail = figures["median_ms"], figures["p99_ms"]
    return [load, setting, f"{figures['decisions_per_second']:,.0f}", f"{median:.1f} ms", f"{tail:.1f} ms"]


def clients(one: dict) -> str:
    return "1 client" if one["clients"] == 1 else f"{one['clients']} clients"


def table(platform: str) -> str:
    result = json.loads((RESULTS / f"serving-{platform}.json").read_text())["result"]
    rows = [
        row(
            f"{clients(one)}, closed loop",
            f"`--max-batch {one['max_batch']} --max-wait-ms {one['max_wait_ms']:g}`",
            one,
        )
        for one in sorted(result["batching"], key=lambda one: one["clients"])
    ]
    rows += [
        row(f"{clients(one)}, {one['observations']} observations a request", "`--max-batch 64`", one)
        for one in result["lists"]
    ]
    rows += [
        row(f"{one['rate']:,.0f} requests a second, open loop", "`--max-batch 64`", one) for one in result["rates"]
    ]
    return table_of(HEAD, rows + of_workers(result), numbers=(2, 3, 4))


def of_workers(result: dict) -> list[list[str]]:
    return [
        row("64 clients, closed loop", f"`--max-batch 64 --workers {one['workers']}`", one)
        for one in result["workers"]
    ]


def main() -> None:
    for platform in ("cpu", "gpu"):
        write_table(table(platform), PAGE, part=f" {platform}")
    workers = json.loads((RESULTS / "serving-workers-gpu.json").read_text())["result"]
    write_table(table_of(HEAD, of_workers(workers), numbers=(2, 3, 4)), PAGE, part=" workers")


if __name__ == "__main__":
    main()
