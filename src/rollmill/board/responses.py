"""Answers the requests of the board's page: rows, curves, details, and files below the folder."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from rollmill.board.contents import FolderContents, Item
from rollmill.board.curves import CurveCache, comparison, spark
from rollmill.board.details import TEXTS, beside, details
from rollmill.core.errors import RollmillError
from rollmill.core.text import truncate
from rollmill.plotting.groups import AXES, setting_text
from rollmill.record.metric_curves import LINE_START, RETURN, metric_names
from rollmill.record.run_directory import RunDirectory

MAX_COMPARED = 40
"""Maximum number of runs that are compared at a time."""
MAX_SPARKS = 200
MAX_RETURN = 80
"""Maximum number of characters of the returns in a row."""
MAX_SMOOTHING = 0.99
PAGE_POLICY = "; ".join(
    [
        "sandbox allow-scripts",
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "img-src data:",
    ]
)
"""Content security policy of a page from a run's directory, which is not trusted and can reach no server."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".gif": "image/gif",
    ".png": "image/png",
    ".mp4": "video/mp4",
    **dict.fromkeys(TEXTS, "text/plain; charset=utf-8"),
}

Query = Mapping[str, Sequence[str]]


class Answer(NamedTuple):
    """An HTTP response to a request from the page."""

    status: int
    kind: str
    """Media type of the body, such as `text/html`."""
    body: bytes | IO[bytes]
    """Data, or an open file that the sender closes."""
    length: int
    policy: str = "default-src 'none'"
    """Content security policy of the answer."""


class Answers:
    """Answers the board's requests about one folder."""

    def __init__(self, root: Path) -> None:
        self._contents = FolderContents(root)
        self._cache = CurveCache()
        self._ways = {
            "/rows": self._rows,
            "/sparks": self._sparks,
            "/curves": self._curves,
            "/details": self._details,
            "/file": self._file,
        }

    def read(self) -> None:
        """Reads the folder in advance, so that the first request is fast."""
        self._contents.changes()

    def answer(self, path: str, query: Query) -> Answer:
        """Returns the answer to a request, given its path and query."""
        way = self._ways.get(path)
        if way is None:
            return _error(404, "this page does not exist")
        try:
            return way(query)
        # the page shows the error, because a damaged run must not look as if the board had ended
        except Exception as error:
            return _error(500, f"{path} failed: {type(error).__name__}: {error}")

    def _rows(self, query: Query) -> Answer:
        since = _one(query, "since", "0")
        changes = self._contents.changes(int(since) if since.isdecimal() and len(since) < 16 else 0)
        return _json(
            {
                "version": changes.version,
                "rows": [self._row(item, changes.varying) for item in changes.items],
                "gone": list(changes.gone),
                "varying": list(changes.varying),
                "files": beside(changes.files),
            }
        )

    def _row(self, item: Item, varying: Sequence[str]) -> dict[str, Any]:
        entry = item.entry
        return {
            "key": item.key,
            "parent": item.parent,
            "kind": entry.kind,
            "state": entry.state,
            "algorithm": entry.algorithm,
            "environment": entry.environment,
            "steps": entry.steps,
            "planned": entry.planned_steps,
            "return": entry.mean_return,
            "returns": entry.returns,
            "shown": truncate(entry.return_text, MAX_RETURN),
            "evaluation": entry.evaluation_return,
            "speed": entry.steps_per_second,
            "seed": entry.seed,
            "trials": entry.trials,
            "finished": entry.finished_trials,
            "changed": None if entry.changed is None else entry.changed.timestamp(),
            "note": entry.note,
            "settings": {name: setting_text(entry.settings[name]) for name in varying if name in entry.settings},
        }

    def _sparks(self, query: Query) -> Answer:
        items = self._items(query)[:MAX_SPARKS]
        return _json({item.key: spark(item) for item in items if item.entry.kind == "run"})

    def _curves(self, query: Query) -> Answer:
        items = [item for item in self._items(query) if item.entry.kind == "run"][:MAX_COMPARED]
        metric, axis = _one(query, "metric", RETURN), _one(query, "x", AXES[0])
        html = comparison(
            self._cache,
            items,
            metric=metric,
            axis=axis if axis in AXES else AXES[0],
            smoothing=_smoothing(_one(query, "smoothing", "0")),
            by_group=_one(query, "group", "") == "1",
        )
        return _json({"html": html, "metrics": sorted(_metrics(items))})

    def _details(self, query: Query) -> Answer:
        items = self._items(query)
        if not items:
            return _error(404, "the run no longer exists")
        return _json({"html": details(self._contents, self._cache, items[0])})

    def _items(self, query: Query) -> list[Item]:
        items = map(self._contents.item, dict.fromkeys(query.get("run", ())))
        return [item for item in items if item is not None]

    def _file(self, query: Query) -> Answer:
        """Returns a file below the folder. No link leads out of it, and only some endings are shown."""
        path = PurePosixPath(_one(query, "path", ""))
        kind = TYPES.get(path.suffix)
        if kind is None or path.is_absolute() or any(part.startswith(".") for part in path.parts):
            return _error(404, "this page or picture does not exist")
        folder = self._contents.folder(str(path.parent))
        try:
            with folder.reading(path.name) as opened:
                file = os.fdopen(os.dup(opened.fileno()), "rb")
        except (RollmillError, OSError, ValueError):
            return _error(404, "this page or picture does not exist")
        return Answer(200, kind, file, os.fstat(file.fileno()).st_size, PAGE_POLICY)


def _metrics(items: Sequence[Item]) -> set[str]:
    names = set[str]()
    for item in items:
        try:
            names |= metric_names(RunDirectory(item.entry.path))
        except RollmillError:
            continue
    return {name for name in names - set(LINE_START) if "_seed" not in name}


def _smoothing(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), MAX_SMOOTHING) if math.isfinite(value) else 0.0


def _one(query: Query, name: str, default: str) -> str:
    return next(iter(query.get(name, ())), default)


def _json(value: Any) -> Answer:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Answer(200, "application/json", body, len(body))


def _error(status: int, text: str) -> Answer:
    body = f"{text}\n".encode(errors="replace")
    return Answer(status, "text/plain; charset=utf-8", body, len(body))
