"""Stores the results of plan searches in the cache, one file per graph, machine, version and objective."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError, DataError, UsageError
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.json_data import parse_json
from rollmill.core.schema import read_as
from rollmill.plan_search.search.result_table import PlanTable
from rollmill.planning.plan import Plan

VERSION = 1
"""Version of the file format, and of the rules by which candidates are judged."""
MAX_BYTES = 2**22


@dataclass(frozen=True)
class StoredSearch:
    """The result of a plan search in the form of its JSON file."""

    budget: float
    plan: dict[str, Any]
    table: PlanTable


def file_for(what: Mapping[str, Any]) -> Path:
    """Returns the path of the file for a search's result. `what` is all that the result depends on, as JSON."""
    digest = hashlib.sha256(json.dumps({"version": VERSION, **what}, sort_keys=True).encode()).hexdigest()
    return cache_root() / "plans" / f"{digest[:24]}.json"


def read_stored(file: Path, *, budget: float) -> tuple[PlanTable, Plan] | None:
    """Returns an earlier search's result. Returns None if no result is stored, or if an incomplete search had less
    than `budget`.
    """
    try:
        value = parse_json(
            folder_in_cache(file).read(file.name, limit=MAX_BYTES), where=str(file), limit=MAX_BYTES
        )
        stored = read_as(StoredSearch, value, where=str(file))
        plan = Plan.from_json(stored.plan)
    except (OSError, CheckpointError, DataError, UsageError):
        return None
    if stored.table.chosen is None or not (stored.table.is_complete or budget <= stored.budget):
        return None
    return stored.table, plan


def store(file: Path, table: PlanTable, plan: Plan, *, budget: float) -> None:
    """Writes the result of a search atomically. If it cannot be written, the next search starts from scratch."""
    text = json.dumps(asdict(StoredSearch(budget, plan.to_json(), table)), indent=1)
    with contextlib.suppress(OSError, CheckpointError):
        folder = folder_in_cache(file)
        folder.make()
        with folder.replacing(file.name, shared=True) as whole:
            whole.write(text.encode())
