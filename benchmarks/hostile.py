"""What becomes of hostile files, sweeps and requests: exit codes and statuses by kind, and all faults.

    python benchmarks/hostile.py [--every 1] [--seconds 1200] [--add] [--output FOLDER]

The cases are those of tests/hostile (runs, sweeps, plans, profiles, caches, learning curves, files of options and
exports) and of tests/serving/hostile_requests.py. All run in this process on a CPU. Rows are appended to
hostile.rows.jsonl beside the result as they come. No case begins after `--seconds`, and the result says whether
all have run. `--add` keeps the rows of an earlier run that have no faults, and tries the others. Writes
results/hostile.json.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hostile"), str(TESTS / "fusion")]

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="one case of so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins later than that")
    parser.add_argument("--add", action="store_true", help="keep the rows of an earlier run that have no faults")
    parser.add_argument("--output", type=Path, help="folder for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = {"ROLLMILL_STATE_DIR": f"{folder}/state", "ROLLMILL_CACHE_DIR": f"{folder}/cache"}
        os.environ.update({"JAX_PLATFORMS": "cpu", **state})
        from measure import RESULTS, write_result

        output = options.output or RESULTS
        output.mkdir(parents=True, exist_ok=True)
        begin, found, complete = time.monotonic(), [], True
        file = output / "hostile.rows.jsonl"
        kept = Kept(file if options.add and file.exists() else None)
        with file.open("w") as rows:
            for row in all_rows(folder, options.every, kept):
                found.append(row)
                rows.write(json.dumps(row) + "\n")
                rows.flush()
                if time.monotonic() - begin > options.seconds:
                    complete = False
                    break
    result = summary(found) | {
        "every": options.every,
        "complete": complete,
        "kept of an earlier run": kept.taken,
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(result, indent=2))
    write_result("hostile", result, directory=output)


class Kept:
    """Rows of an earlier run that have no faults.

    Args:
        file: has them; None if there was no earlier run.
    """

    def __init__(self, file: Path | None) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self.taken = 0
        for row in map(json.loads, [] if file is None else file.read_text().splitlines()):
            if not row["faults"]:
                self._rows.setdefault((row["kind"], row["name"]), []).append(row)

    def take(self, kind: str, name: str) -> Row | None:
        """A row of this name that was not taken yet."""
        rows = self._rows.get((kind, name))
        self.taken += bool(rows)
        return rows.pop(0) if rows else None


def all_rows(folder: Path, every: int, kept: Kept) -> Iterator[Row]:
    """A row for each case."""
    from hostile_runs import healthy

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        source = healthy(folder)
    yield from file_rows(folder, source, every, kept)
    yield from sweep_rows(folder, every, kept)
    yield from request_rows(source, every, kept)
    yield from run_rows(folder, source, every, kept)


def row_of(kind: str, name: str, outcome: str, faults: Any) -> Row:
    """What is kept of a case."""
    return {"kind": kind, "name": name, "outcome": outcome, "faults": list(faults)}


@contextlib.contextmanager
def empty(folder: Path) -> Iterator[Path]:
    """A new folder for one case."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def file_rows(folder: Path, source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Hostile files."""
    from hostile_files import cases, exports
    from hostile_trial import tried

    for case in (*islice(cases(), 0, None, every), *islice(exports(source), 0, None, every)):
        if (row := kept.take(case.kind, case.name)) is not None:
            yield row
            continue
        with empty(folder) as root:
            outcome = tried(case, root)
        yield row_of(case.kind, case.name, f"exit code {outcome.code}", outcome.faults)


def run_rows(folder: Path, source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Hostile run directories, each of which names its own exit code and sentence."""
    from hostile_runs import cases, faults

    for case in islice(cases(), 0, None, every):
        if (row := kept.take(f"runs: {case.kind}", case.name)) is not None:
            yield row
            continue
        with empty(folder) as root:
            yield row_of(f"runs: {case.kind}", case.name, f"exit code {case.code}", faults(case, source, root))


def sweep_rows(folder: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Hostile sweeps; their processes are not started."""
    from hostile_files import called
    from hostile_trial import Case, tried
    from test_hostile_sweeps import cases, touch_everything

    from rollmill.cli import sweep

    sweep.run_sweep = touch_everything
    call = called("sweep", "--resume", "GOT/sweep")
    for case in islice(cases(), 0, None, every):
        if (row := kept.take("sweeps", case.name)) is not None:
            yield row
            continue
        make = lambda got, outside, case=case: case.make(got / "sweep", outside)
        with empty(folder) as root:
            outcome = tried(Case("sweeps", case.name, make, call), root)
        let_in = ["was not refused"] if case.names_code and outcome.code != 2 else []
        yield row_of("sweeps", case.name, f"exit code {outcome.code}", (*outcome.faults, *let_in))


def request_rows(source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Hostile requests."""
    from serving.conftest import serving
    from serving.hostile_requests import TOKEN, Strangers, requests

    with serving(source, token=TOKEN.encode()) as server, contextlib.closing(Strangers(server)) as strangers:
        for request in islice(requests(), 0, None, every):
            if (row := kept.take(f"requests: {request.kind}", request.name)) is not None:
                yield row
                continue
            answered = strangers.tried(request)
            outcome = f"status {answered.statuses[0]}" if answered.statuses else "no answer"
            yield row_of(f"requests: {request.kind}", request.name, outcome, answered.faults)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts by kind and outcome, and every case with a fault."""
    counts: dict[str, Counter] = {}
    for row in rows:
        counts.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    wrong = [row for row in rows if row["faults"]]
    return {"cases": len(rows), "cases with faults": len(wrong), "counts": counts, "faults": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
