"""Shows one run or sweep in detail, as part of the board's page."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollmill.board.contents import SUFFIXES, FolderContents, Item
from rollmill.board.curves import CurveCache, small_chart
from rollmill.core.errors import RollmillError
from rollmill.core.folder import Folder
from rollmill.core.shell import command
from rollmill.core.text import compact, format_count, number
from rollmill.envs.options import option_text
from rollmill.overview.entries import Entry
from rollmill.overview.table import steps_text
from rollmill.pages.page import escape_html, folding_section, table, tiles
from rollmill.planning.plan import Plan
from rollmill.plotting.groups import SeedCurve, object_in, setting_text
from rollmill.record.metric_curves import metric_names
from rollmill.record.run_directory import RunDirectory
from rollmill.record.status import RETURNS
from rollmill.sweeps.creation import resume_command
from rollmill.sweeps.directory import SweepDirectory

PICTURES, FILMS = (".gif", ".png"), (".mp4",)
MAX_PICTURES = 12
MAX_CHARTS = 16
TEXTS = (".csv", ".json", ".jsonl", ".log", ".txt")
FIRST = ("episode/return", "evaluation/return", "episode/length", "steps_per_second", "learning_rate")
"""Metrics that are drawn first, before the losses and all others."""


def details(contents: FolderContents, cache: CurveCache, item: Item) -> str:
    """Returns the state, pages, pictures, curves, plan and settings of a run as HTML."""
    entry, run = item.entry, RunDirectory(item.entry.path)
    files = [*_files_of(contents, item), *contents.files_beside(item)]
    parts = [
        f"<h2>{escape_html(item.key)}</h2>",
        f'<p class="dim">{escape_html(_headline(entry))}</p>',
        tiles(_figures(entry)),
        _links(files),
        _pictures(files),
    ]
    if entry.kind == "run":
        parts += [*_charts(cache, item, run), *_plan(run)]
        settings = [(name, setting_text(value)) for name, value in entry.settings.items()]
        parts.append(folding_section("all settings", [table(("setting", "value"), settings, most=100)]))
    parts.append(_commands(entry, run))
    return "\n".join(part for part in parts if part)


def file_url(path: str) -> str:
    """Returns the address at which the board serves a file below its folder."""
    return f"file?{urlencode({'path': path}, errors='backslashreplace')}"


def _headline(entry: Entry) -> str:
    on = f"{entry.algorithm or '?'} on {entry.environment or '?'}"
    seeds = f", {entry.num_seeds} seeds" if (entry.num_seeds or 1) > 1 else ""
    trials = "" if entry.trials is None else f", {entry.finished_trials} of {format_count(entry.trials, 'trial')}"
    note = f" ({entry.note})" if entry.note else ""
    return f"{entry.state}: {on}{seeds}{trials}{note}"


def _figures(entry: Entry) -> Iterator[tuple[str, str]]:
    for kind, value in entry.returns.items():
        yield number(value), f"mean return of {kind} in the latest episodes"
    if entry.mean_return is not None and not entry.returns:
        yield number(entry.mean_return), "mean return of the latest episodes"
    if entry.evaluation_return is not None:
        yield number(entry.evaluation_return), "mean return of the latest evaluation"
    if entry.steps is not None:
        yield steps_text(entry), "environment steps"
    if entry.steps_per_second is not None:
        yield compact(entry.steps_per_second), "steps/s"


def _files_of(contents: FolderContents, item: Item) -> list[str]:
    """Returns the pages, pictures and tables of a run or sweep, as paths below the folder."""
    kinds = _kinds(contents.folder(item.key))
    named = sorted(name for name, kind in kinds.items() if kind == "file" and _is_shown(name))
    inner = [
        f"{name}/{file}"
        for name, kind in sorted(kinds.items())
        if kind == "folder"
        for file in _pages(item, contents, name)
    ]
    return [file if item.key == "." else f"{item.key}/{file}" for file in (*named, *inner)]


def _pages(item: Item, contents: FolderContents, name: str) -> list[str]:
    """Returns the pages in a folder inside of a run's, such as a profile's."""
    if name in ("checkpoints", "tensorboard", "trials", "fault"):
        return []
    kinds = _kinds(contents.folder(item.key).inner(name))
    return sorted(file for file, kind in kinds.items() if kind == "file" and file.endswith(".html"))


def _kinds(folder: Folder) -> Mapping[str, str]:
    try:
        return folder.kinds()
    except (OSError, RollmillError):
        return {}


def _is_shown(name: str) -> bool:
    return not name.startswith(".") and name.endswith((*SUFFIXES, *TEXTS))


def _links(files: Sequence[str]) -> str:
    shown = [file for file in files if not file.endswith((*PICTURES, *FILMS))]
    made = (
        f'<a href="{escape(file_url(file))}" target="_blank" rel="noopener">{escape_html(Path(file).name)}</a>'
        for file in sorted(shown, key=lambda file: not file.endswith(".html"))
    )
    return f'<p class="links">{" ".join(made)}</p>' if shown else ""


def _pictures(files: Sequence[str]) -> str:
    shown = [file for file in files if file.endswith((*PICTURES, *FILMS))][:MAX_PICTURES]
    return f'<div class="pictures">{"".join(map(_picture, shown))}</div>' if shown else ""


def _picture(file: str) -> str:
    url, name = escape(file_url(file)), escape_html(Path(file).name)
    if file.endswith(FILMS):
        return f'<figure><video src="{url}" controls loop muted></video><figcaption>{name}</figcaption></figure>'
    return (
        f'<figure><a href="{url}" target="_blank" rel="noopener"><img src="{url}" alt="{name}" loading="lazy"></a>'
        f"<figcaption>{name}</figcaption></figure>"
    )


def _charts(cache: CurveCache, item: Item, run: RunDirectory) -> list[str]:
    """Returns small figures of the metrics that change, over the run's steps."""
    try:
        names = metric_names(run)
    except RollmillError:
        return []
    charts = []
    for name in sorted((name for name in names if "_seed" not in name), key=_rank)[:MAX_CHARTS]:
        if curves := [curve for curve in cache.curves(item, name) if _varies(curve)]:
            charts.append(small_chart(curves, name))
    return ['<div class="charts">', *charts, "</div>"] if charts else []


def _varies(curve: SeedCurve) -> bool:
    return len({point.value for point in curve.points}) > 1


def _rank(name: str) -> tuple:
    if name.startswith(RETURNS):
        return (-1, False, name)
    return (FIRST.index(name) if name in FIRST else len(FIRST), not name.startswith("losses/"), name)


def _plan(run: RunDirectory) -> list[str]:
    """Returns the groups of a run's plan as boxes, and the edges between them."""
    try:
        plan = Plan.from_json(run.read_config().get("plan"))
    except RollmillError:
        return []
    boxes = [
        f'<div class="group"><b>{escape_html(group.name)} × {group.replicas}</b>'
        f"<span>{escape_html(' + '.join(group.fragments))}</span>"
        f'<span class="dim">device: {group.device}{"" if group.synchronous else ", asynchronous"}</span></div>'
        for group in plan.partition.groups
    ]
    holder = plan.partition.holder
    edges = [
        f"{edge.name}: {holder(edge.source).name} → {holder(edge.target).name}"
        for edge in plan.partition.cut_edges
    ]
    across = f'<p class="how">Between groups: {escape_html("; ".join(edges))}.</p>' if edges else ""
    title = f"<h3>Plan: {escape_html(plan.partition.name)}, placed as {escape_html(plan.place)}</h3>"
    return [title, f'<div class="plan">{"".join(boxes)}</div>', across]


def _commands(entry: Entry, run: RunDirectory) -> str:
    """Returns the commands that continue from here, to copy."""
    draw = command("plot", entry.path)  # it reads files alone, and imports nothing
    if entry.kind == "sweep":
        lines = [*_resume_sweep(entry), draw]
    else:
        lines = [run.command("evaluate"), run.command("render"), draw]
        if entry.state in ("stopped", "killed", "failed"):
            lines.insert(0, run.command("doctor" if entry.state == "failed" else "resume"))
        if entry.algorithm and entry.environment:
            named = (entry.algorithm, entry.environment, *_environment_options(run))
            output = ("--output", entry.path / "profile")
            lines.append(command("profile", *named, *output, imports=run.imports()))
    made = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
    return folding_section("commands", [f'<ul class="commands">{made}</ul>'])


def _environment_options(run: RunDirectory) -> list[str]:
    """Returns the command-line arguments for the environment options of a run, or none if the run is damaged."""
    try:
        options = object_in(object_in(run.read_config(), "graph"), "environment_options")
    except RollmillError:
        return []
    return [word for name, value in options.items() for word in ("--env-option", option_text(name, value))]


def _resume_sweep(entry: Entry) -> list[str]:
    """Returns the command that resumes a sweep, or none if the sweep is damaged."""
    try:
        return [resume_command(SweepDirectory.open(entry.path))]
    except RollmillError:
        return []


def beside(files: Sequence[str]) -> list[Mapping[str, Any]]:
    """Returns the names and addresses of the pages and pictures in a run's folder."""
    return [{"name": file, "url": file_url(file)} for file in files]
