"""Whether every back end computes what XLA computes at the edges of its types, on this CPU and on one GPU.

    python benchmarks/fusion_edges.py run [--only PART] [--processes 8]
    python benchmarks/fusion_edges.py table

The cases are those of tests/fusion/edges.py: every primitive that kernels know, for every type that it takes, on
all combinations of infinities, NaN, signed zeros, denormals, the ends of integers and the like. Each is computed
unfused by XLA, by the reference (`evaluate`) and as machine code on the CPU; and, where there is a GPU, unfused,
by the reference and as a Triton kernel there. Integers and flags are compared exactly, floats to a relative 1e-5,
or two units of a 16-bit type, with NaN, infinities and the signs of zeros as they are; docs/numbers.md says where
either sign or either reading of a denormal is right.
`run` writes results/fusion-edges.json (with a GPU, fusion-edges-gpu.json); `table` prints the tables of
docs/numbers.md from these.
"""

import json
import multiprocessing
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "fusion"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

CHUNK = 12
"""Cases in one program."""


MAX_NAMED = 8
FAMILIES = {
    "integers": ("int8", "int16", "int32", "uint8", "uint16", "uint32"),
    "floats": ("bfloat16", "float16", "float32"),
    "rows of floats": ("bfloat16 rows", "float32 rows"),
}
"""Types that a table names by one word."""


def main() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from measure import one_of, options

    chosen = options(
        __doc__,
        {"command": one_of("run", "table")},
        only=("", "cases whose names contain this"),
        processes=os.cpu_count() or 1,
    )
    if chosen.command == "table":
        print(table(chosen.output))
    else:
        run(chosen)


def run(chosen: Any) -> None:
    from edges import by_operands, cases
    from measure import write_result

    sizes = [len(group) for group in by_operands([case for case in cases() if chosen.only in case.name])]
    pieces = [(chosen.only, n, first) for n, size in enumerate(sizes) for first in range(0, size, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        found = [row for rows in pool.imap_unordered(compare_piece, pieces) for row in rows]
    found.sort(key=lambda row: (row["way"], row["case"]))
    for row in found:
        if row["differing"] or row["refusal"]:
            print(row["way"], row["case"], row["differing"], row["refusal"], *row["examples"], sep=" | ")
    summary = summarised(found)
    print(json.dumps(summary, indent=2))
    on_gpu = any(row["way"].startswith("gpu") for row in found)
    name = "fusion-edges-gpu" if on_gpu else "fusion-edges"
    write_result(name, {"summary": summary, **compact(found)}, chosen.output)


def compact(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the cells of each primitive's types, which are equal in all ways, and the rows with differences or
    refusals.
    """
    cells: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        cells[row["primitive"]][row["case"].removeprefix(row["primitive"]).strip()] = row["cells"]
    return {"cells": cells, "exceptions": [row for row in rows if row["differing"] or row["refusal"]]}


def compare_piece(piece: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Compares some cases of one group, on the CPU and on a GPU where there is one."""
    only, number, first = piece
    import jax
    from code_runs import evaluate_by_code
    from edges import by_operands, cases, compare
    from kernel_runs import evaluate_by_kernel

    from rollmill.fusion import evaluate

    group = by_operands([case for case in cases() if only in case.name])[number][first : first + CHUNK]
    platforms = {"cpu": {"reference": evaluate, "machine code": evaluate_by_code}}
    if jax.default_backend() == "gpu":
        platforms["gpu"] = {"reference": evaluate, "kernel": evaluate_by_kernel}
    rows = []
    for platform, ways in platforms.items():
        device = jax.devices(platform)[0]
        with jax.default_device(device):
            own = [case._replace(operands=jax.device_put(case.operands, device)) for case in group]
            primitives = {case.name: case.primitive for case in group}
            for outcome in compare(own, ways):
                names = {"way": f"{platform}: {outcome.way}", "primitive": primitives[outcome.case]}
                rows.append(outcome._asdict() | names)
    return rows


def summarised(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Cells, and those that differ or are refused, of each way."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"cases": 0, "cells": 0, "differ": 0, "refused": 0})
    for row in rows:
        own = found[row["way"]]
        own["cases"] += 1
        own["cells"] += row["cells"]
        own["differ"] += row["differing"]
        own["refused"] += row["cells"] if row["refusal"] else 0
    return dict(found)


def table(folder: Path) -> str:
    """Returns the results as Markdown: a row for each way, one for each primitive that differs somewhere, and
    the other primitives by their types.
    """
    from measure import read_result

    result = read_result("fusion-edges-gpu", folder)
    ways = list(result["summary"])
    lines = ["| back end | cases | cells | differ | rejected |", "|---|--:|--:|--:|--:|"]
    for way, own in result["summary"].items():
        lines.append(f"| {way} | " + " | ".join(f"{own[name]:,}" for name in own) + " |")
    differing = {row["primitive"] for row in result["exceptions"]}
    if differing:
        lines += ["", f"| primitive | types | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    for primitive in sorted(differing):
        types = result["cells"][primitive]
        own = [row for row in result["exceptions"] if row["primitive"] == primitive]
        verdicts = " | ".join(_verdict([row for row in own if row["way"] == way], len(types)) for way in ways)
        lines.append(f"| `{primitive}` | {types_in_words(list(types))} | {verdicts} |")
    alike: dict[str, list[str]] = {}
    for primitive in sorted(set(result["cells"]) - differing):
        alike.setdefault(types_in_words(list(result["cells"][primitive])), []).append(f"`{primitive}`")
    lines += ["", "| types for which all back ends agree with XLA | primitives |", "|---|---|"]
    lines += [
        f"| {types} | {', '.join(names)} |" for types, names in sorted(alike.items(), key=lambda one: -len(one[1]))
    ]
    return "\n".join(lines)


def types_in_words(types: list[str]) -> str:
    """Returns types in few words: conversions by their number, and families of integers by their name."""
    if sum(" to " in name for name in types) > MAX_NAMED:
        return f"{len(types)} pairs of types"
    kept = list(types)
    for family, members in FAMILIES.items():
        if set(members) <= set(kept):
            kept = [family, *(name for name in kept if name not in members)]
    return ", ".join(kept)


def _verdict(exceptions: list[dict[str, Any]], types: int) -> str:
    refused = sum(bool(row["refusal"]) for row in exceptions)
    if refused == types:
        return "refused"
    differing = sum(row["differing"] for row in exceptions)
    return f"{differing:,} differ" if differing else f"as XLA, {refused} refused" if refused else "as XLA"


if __name__ == "__main__":
    main()
