"""The tables of docs/profiling.md, from the results of profiler.py and advice.py.

    python benchmarks/profiler_tables.py

Reads results/profiler-PART-PLATFORM.json, as far as they are there; measures nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

from measure import RESULTS, machine_of, table_of, write_table

PAGE = Path(__file__).parent.parent / "docs" / "profiling.md"
PLATFORMS = ("cpu", "gpu")


def errors() -> str:
    """How far the corrected duration of an iteration is from the unprofiled one, in each of several profiles.

    `windows` is the smallest number of windows of a profile. `with it` has the standard deviation among windows.
    `device waits` has the range of the windows with the profiler, as shares of an iteration without it. `by
    calibration` is the median error of a correction that knows nothing of the training without the profiler.
    """
    head = [
        "training",
        "on",
        "windows",
        "without the profiler",
        "with it",
        "device waits",
        "error of each profile",
        "by calibration",
    ]
    rows = []
    for machine, name, row in rows_of("errors"):
        profiles = row["profiles"]
        slowdowns = [[float(each) for each in one["slowdowns"].split()] for one in profiles]
        rows.append(
            [
                name,
                _machine(machine, profiles),
                str(min(map(len, slowdowns))),
                duration(median(each["iteration_seconds"] for each in profiles)),
                f"{median(each['slowdown'] for each in profiles):.2f} ± {median(map(stdev, slowdowns)):.2f} x",
                _range([float(each) for one in profiles for each in one.get("waiting", "").split()]),
                ", ".join(f"{each['error']:+.1%}" for each in profiles),
                _median_error([each.get("error_by_calibration") for each in profiles]),
            ]
        )
    return table_of(head, rows, numbers=(2, 3, 4, 5, 6, 7))


def _median_error(errors: Sequence[float | None]) -> str:
    known = [each for each in errors if each is not None]
    return f"{median(known):+.0%}" if known else ""


def _range(shares: Sequence[float]) -> str:
    return f"{percent(min(shares))} to {percent(max(shares))}" if shares else ""


def _machine(machine: str, profiles: Sequence[Mapping[str, Any]]) -> str:
    """The machine of a row's profiles, which may have had fewer or more cores than those of the last row."""
    on_gpu = any(each["devices"] for each in profiles)
    return machine if on_gpu else f"{min(each['cores'] for each in profiles)} cores"


def devices() -> str:
    """The driver's utilisation beside the time that kernels ran and the activity of the processors.

    Beside it the share of kernels' time that belongs to an operation.
    """
    kinds = ("utilisation", "occupied", "sm_activity")
    head = ["training", "on", "utilisation (NVML)", "a kernel ran", "SMs active", "kernels of a named operation"]
    rows = []
    for machine, name, row in rows_of("errors"):
        if first := [each["devices"][0] for each in row["profiles"] if each["devices"]]:
            named = 1.0 - median(each["unnamed_share_of_device"] for each in row["profiles"])
            shares = [median(each[kind] or 0.0 for each in first) for kind in kinds]
            rows.append([name, machine, *map(percent, shares), f"{named:.1%}"])
    return table_of(head, rows, numbers=(2, 3, 4, 5)) if rows else ""


def percent(share: float) -> str:
    return f"{share:.0%}"


def planted() -> str:
    """How much of the work that was added to an operation is found there, and how much in another one."""
    head = [
        "work added to",
        "on",
        "an iteration takes longer by",
        "the operation",
        "difference",
        "largest change of another operation",
    ]
    rows = [
        [
            f"`{name}`",
            machine,
            duration(row["added_seconds"]),
            duration(row["attributed_seconds"]),
            f"{row['error']:+.1%}",
            f"{row['largest_other']:+.1%} of the iteration (`{row['other']}`)",
        ]
        for machine, name, row in rows_of("planted")
    ]
    return table_of(head, rows, numbers=(2, 3, 4, 5))


def advice() -> str:
    """What following a piece of advice saved of an iteration's time, beside what was predicted."""
    head = ["training", "on", "advice", "predicted to save", "saved", "steps a second"]
    return table_of(head, [[name, *cells] for name, *cells in _advised()], numbers=(3, 4, 5))


def _advised() -> Iterator[list[str]]:
    for platform in PLATFORMS:
        file = RESULTS / f"advice-{platform}.json"
        stored = json.loads(file.read_text()) if file.exists() else {"result": {"rows": {}}}
        for name, row in sorted(stored["result"]["rows"].items()):
            machine = machine_of(stored["hardware"]) if platform == "gpu" else f"{stored['result']['cores']} cores"
            if "skipped" not in row and not row["followed"]:
                yield [name, machine, "nothing is predicted", "", "", ""]
            for one in row.get("followed", ()):
                before, after = (median(each) for each in one["steps_per_second"])
                shares = [f"{100 * one[key]:.0f}%" for key in ("predicted", "saved")]
                yield [name, machine, f"`{one['options']}`", *shares, f"{after / before:.2f} x"]


def survey() -> str:
    """Shares of the working time by kinds of operations, the idle share of all processes' time, and the error."""
    kinds = ("simulation", "inference", "search", "backpropagation", "replay", "preparation", "host", "rest")
    rows = [
        [name, *(percent(row["shares"][kind]) if row["shares"][kind] >= 0.005 else "" for kind in kinds)]
        + [percent(row["idle"]), f"{row['error']:+.0%}"]
        for _, name, row in rows_of("survey")
    ]
    return table_of(["training", *kinds, "idle", "error"], rows, numbers=range(1, len(kinds) + 3))


def rows_of(part: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Machine, name and figures of each row of a part's results, those of each platform by name."""
    for platform in PLATFORMS:
        file = RESULTS / f"profiler-{part}-{platform}.json"
        if file.exists():
            stored = json.loads(file.read_text())
            for name, row in sorted(stored["result"]["rows"].items()):
                yield machine_of(stored["hardware"]), name, row


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


SOURCES = {"devices": "errors"}
"""Parts whose tables others share."""
TABLES = {"errors": errors, "devices": devices, "planted": planted, "survey": survey}


def main() -> None:
    for part, table in TABLES.items():
        if any(rows_of(SOURCES.get(part, part))) and (text := table()):
            write_table(text, PAGE, part=f" {part}")
    if any(_advised()):
        write_table(advice(), PAGE, part=" advice")


if __name__ == "__main__":
    main()
