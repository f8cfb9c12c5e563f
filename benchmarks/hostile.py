"""What becomes of hostile files, sweeps and requests: exit codes and statuses by kind, and all faults.

    python benchmarks/hostile.py [--every 1] [--seconds 1200] [--add] [--output FOLDER]

The cases are those of tests/hostile (runs, sweeps, plans, profiles, caches, learning curves, files of options and
exports) and of tests/serving/hostile_requests.py. All run in this process on a CPU. Rows are appended to
hostile.rows.jsonl beside the result as they come. No case begins after `--seconds`, and the result says whether
all have run. `--add` keeps the rows of an earlier run that have no faults, and tries the others. Writes
results/hostile.json.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hostile"), str(TESTS / "fusion")]

Row = dict[str, Any]


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        state = {"ROLLMILL_STATE_DIR": f"{name}/state", "ROLLMILL_CACHE_DIR": f"{name}/cache"}
        os.environ.update({"JAX_PLATFORMS": "cpu", **state})
        from measure import options, write_result

        chosen = options(
            __doc__,
            every=(1, "one case of so many"),
            seconds=(float("inf"), "no case begins later"),
            add=(False, "keep the rows of an earlier run that have no faults"),
        )
        chosen.output.mkdir(parents=True, exist_ok=True)
        begin, found, complete = time.monotonic(), [], True
        file = chosen.output / "hostile.rows.jsonl"
        kept = Kept(file if chosen.add and file.exists() else None)
        with file.open("w") as rows:
            for row in all_rows(Path(name), chosen.every, kept):
                found.append(row)
                rows.write(json.dumps(row) + "\n")
                rows.flush()
                if time.monotonic() - begin > chosen.seconds:
                    complete = False
                    break
    seconds = round(time.monotonic() - begin)
    result = {**summary(found), "every": chosen.every, "complete": complete, "kept of an earlier run": kept.taken}
    print(json.dumps(result, indent=2))
    write_result("hostile", result | {"seconds": seconds}, chosen.output)


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
        """Returns a row of this name that was not taken yet."""
        rows = self._rows.get((kind, name))
        self.taken += bool(rows)
        return rows.pop(0) if rows else None


def all_rows(folder: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Yields a row for each case."""
    from hostile_runs import healthy

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        source = healthy(folder)
    yield from file_rows(folder, source, every, kept)
    yield from sweep_rows(folder, every, kept)
    yield from request_rows(folder, source, every, kept)
    yield from run_rows(folder, source, every, kept)


def row_of(kind: str, name: str, outcome: str, faults: Any) -> Row:
    """What is kept of a case."""
    return {"kind": kind, "name": name, "outcome": outcome, "faults": list(faults)}


def judged(
    folder: Path, kept: Kept, cases: Iterable[Any], kind: Callable[[Any], str], judge: Callable[[Any, Path], tuple]
) -> Iterator[Row]:
    """Yields a row for each case, kept or by `judge(case, new folder) -> outcome, faults`."""
    for case in cases:
        if (row := kept.take(kind(case), case.name)) is not None:
            yield row
            continue
        with tempfile.TemporaryDirectory(dir=folder) as root:
            outcome, faults = judge(case, Path(root))
        yield row_of(kind(case), case.name, outcome, faults)


def file_rows(folder: Path, source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Yields the rows of hostile files."""
    from hostile_files import cases, exports
    from hostile_trial import tried

    def judge(case: Any, root: Path) -> tuple:
        outcome = tried(case, root)
        return f"exit code {outcome.code}", outcome.faults

    chosen = (*islice(cases(), 0, None, every), *islice(exports(source), 0, None, every))
    return judged(folder, kept, chosen, lambda case: case.kind, judge)


def run_rows(folder: Path, source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Yields the rows of hostile run directories, each of which names its own exit code and sentence."""
    from hostile_runs import cases, faults

    judge = lambda case, root: (f"exit code {case.code}", faults(case, source, root))
    return judged(folder, kept, islice(cases(), 0, None, every), lambda case: f"runs: {case.kind}", judge)


def sweep_rows(folder: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Yields the rows of hostile sweeps, whose processes are not started."""
    from hostile_files import called
    from hostile_trial import Case, tried
    from test_hostile_sweeps import cases, touch_everything

    from rollmill.cli import sweep

    sweep.run_sweep = touch_everything
    call = called("sweep", "--resume", "GOT/sweep")

    def judge(case: Any, root: Path) -> tuple:
        make = lambda got, outside: case.make(got / "sweep", outside)
        outcome = tried(Case("sweeps", case.name, make, call), root)
        let_in = ["was not refused"] if case.names_code and outcome.code != 2 else []
        return f"exit code {outcome.code}", (*outcome.faults, *let_in)

    return judged(folder, kept, islice(cases(), 0, None, every), lambda case: "sweeps", judge)


def request_rows(folder: Path, source: Path, every: int, kept: Kept) -> Iterator[Row]:
    """Yields the rows of hostile requests."""
    from serving.conftest import serving
    from serving.hostile_requests import TOKEN, Strangers, requests

    with serving(source, token=TOKEN.encode()) as server, contextlib.closing(Strangers(server)) as strangers:

        def judge(request: Any, root: Path) -> tuple:
            answered = strangers.tried(request)
            return f"status {answered.statuses[0]}" if answered.statuses else "no answer", answered.faults

        chosen = islice(requests(), 0, None, every)
        yield from judged(folder, kept, chosen, lambda request: f"requests: {request.kind}", judge)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts by kind and outcome, and every case with a fault."""
    counts: dict[str, Counter] = {}
    for row in rows:
        counts.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    wrong = [row for row in rows if row["faults"]]
    return {"cases": len(rows), "cases with faults": len(wrong), "counts": counts, "faults": wrong}


if __name__ == "__main__":
    main()
