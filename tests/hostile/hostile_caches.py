"""Files of the cache by name: where each lies, a healthy document, and what reads it and writes it anew."""

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from rollmill.core.errors import CannotFuse, CheckpointError
from rollmill.fusion.backends.triton.compile import HEADER, _source_file
from rollmill.fusion.cache import read_cached, write_once
from rollmill.fusion.tune.timing import LaunchSearch
from rollmill.plan_search import result_store as stored
from rollmill.plan_search.search.candidate import Candidate
from rollmill.plan_search.search.result_table import CandidateRow, PlanTable
from rollmill.planning.plan import Plan
from rollmill.profiling import calibration
from rollmill.profiling.results import Ceilings
from rollmill.programs.all_reduce_choice import WAYS

GROUP = {"name": "a", "fragments": ["environment", "policy", "gradients", "update"]}
PLAN = Plan.from_json({"version": 1, "distribution": "d", "place": "processes", "groups": [GROUP]})
ROW = CandidateRow(Candidate("gpu-only", "program"), "chosen", "it is the fastest", measured_speed=10.0)
TABLE = PlanTable((ROW,), 1.0)
SEARCH = {"budget": 1.0, "plan": PLAN.to_json(), "table": asdict(TABLE)}
MACHINE = calibration.Calibration("a machine", 0.5, 100.0, Ceilings(1e9, 1e9))
SOURCE = "def kernel():\n    pass\n"


def use_search(file: Path) -> None:
    """Reads the result of a plan search."""
    found = stored.read_stored(file, budget=1.0)
    if found is not None:
        json.dumps([asdict(found[0]), found[1].to_json()])
    stored.store(file, TABLE, PLAN, budget=1.0)


def use_launch(file: Path) -> None:
    """Reads the fastest launch of a kernel."""
    search = LaunchSearch(file, [(1, 2)], *[None] * 4)
    found = search.stored_result()
    assert found is None or (found.launch == (1, 2) and (found.speedup is None or found.speedup > 0))
    _write(file, {"launch": [1, 2], "seconds": 1.0, "unfused_seconds": 2.0})


def use_mean(file: Path) -> None:
    """Reads the fastest way to take means."""
    found = read_cached(file, lambda it: WAYS.index(it["way"]))
    assert found is None or found in range(len(WAYS))
    _write(file, {"way": WAYS[0]})


def use_calibration(file: Path) -> None:
    """Reads the calibration of a machine."""
    found = calibration._read(file)
    if found is not None:
        json.dumps(asdict(found))
    calibration._keep(file, MACHINE)


def use_kernel(file: Path) -> None:
    """Writes the source of a kernel, which is then imported: it has to be that and nothing else."""
    try:
        assert _source_file(SOURCE).read_text().endswith(SOURCE)
    except CannotFuse:
        return


def _write(file: Path, document: object) -> None:
    """Writes a file as its search does, which goes on where it cannot."""
    with contextlib.suppress(OSError, CheckpointError):
        write_once(file, json.dumps(document))


DIGEST = hashlib.sha256(f"{HEADER}\n{SOURCE}".encode()).hexdigest()
CACHES = {
    "searches": ("plans/a.json", SEARCH, use_search),
    "launches": ("launches/a.json", {"launch": [1, 2], "seconds": 1.0, "unfused_seconds": 2.0}, use_launch),
    "means": ("means/a.json", {"way": WAYS[0], "seconds": {WAYS[0]: 1.0}}, use_mean),
    "calibrations": ("profiling/calibration.json", asdict(MACHINE), use_calibration),
    "kernels": (f"kernels/kernel_{DIGEST[:16]}.py", SOURCE, use_kernel),
}
