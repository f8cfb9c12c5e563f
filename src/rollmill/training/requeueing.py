"""Supports batch systems that start the same training command again: the command resumes its earlier run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.json_data import short_json, writable
from rollmill.dataflow import Graph
from rollmill.record.json_files import plain
from rollmill.record.run_directory import RunDirectory, download_run
from rollmill.record.run_files import CONFIG
from rollmill.runs.creation import recorded_options
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import DERIVED, SavedConfig, flat, read_saved, undone
from rollmill.runs.trust import named_places, remember, trusted_modules
from rollmill.training.placing import choose_plan

UNCOMPARED = (*DERIVED, "custom")
"""Settings of a graph that are not compared by value, since resuming compares what they compute."""


def run_to_go_on(algorithm: Graph, options: RunOptions) -> RunDirectory | None:
    """Returns the existing run in the requested directory if it may be resumed, or None if there is no run yet.

    Raises a `UsageError` that lists the differing fields if the directory contains a run with another
    configuration, and a `CheckpointError` if the configuration is damaged.
    """
    assert options.run_dir is not None
    root = Path(options.run_dir)
    download_run(root)
    if not (root / CONFIG).exists():
        return None
    run = RunDirectory.open(root)
    saved = read_saved(run)
    if differing := _differences(algorithm, options, saved):
        raise UsageError(
            f"{root} contains a run with another configuration: {'; '.join(differing)}. hint: choose another "
            f"run_dir, or resume this run, with --set for changes: {run.command('resume')}"
        )
    # The command itself names these modules, on a machine that may not have created the run.
    remember(run, sorted({*trusted_modules(run), *named_places(saved)}))
    return run


def _differences(algorithm: Graph, options: RunOptions, saved: SavedConfig) -> list[str]:
    """Describes each setting in which the requested training differs from the run."""
    given = _settings(algorithm)
    graph = {name: value for name, value in saved.graph.items() if name not in UNCOMPARED}
    if "hyperparameters" in saved.graph.get("custom", ()):  # such hyperparameters cannot be stored in a file
        given, graph = {**given, "config": {}}, {**graph, "config": {}}
    now = flat("", plain(given))
    begun = undone(flat("", graph), saved.changes)
    changed = flat("", graph)
    found = _unlike(now, changed) if len(_unlike(now, changed)) < len(_unlike(now, begun)) else _unlike(now, begun)
    return [*found, *_unlike_options(options, saved), *_unlike_plan(algorithm, options, saved)]


def _settings(algorithm: Graph) -> dict[str, Any]:
    """Returns the settings of a graph as a run records them, but for what `UNCOMPARED` names."""
    settings = {name: value for name, value in writable(algorithm.settings).items() if name not in UNCOMPARED}
    try:
        plain(settings["config"])
    except TypeError:
        return {**settings, "config": {}}
    return settings


def _unlike_options(options: RunOptions, saved: SavedConfig) -> list[str]:
    now, default = plain(recorded_options(options)), plain(recorded_options(RunOptions()))
    begun = {name: saved.options.get(name, value) for name, value in default.items()}
    if now["reduction"] == default["reduction"]:  # the recorded all-reduce was chosen by timing when the run began
        begun["reduction"] = now["reduction"]
    return _unlike(now, begun)


def _unlike_plan(algorithm: Graph, options: RunOptions, saved: SavedConfig) -> list[str]:
    """Returns whether the file of a plan says something else than the plan of the run."""
    if options.plan is None or plain(choose_plan(algorithm, options).to_json()) == saved.plan:
        return []
    return [f"plan={options.plan} is not the plan of the run"]


def _unlike(now: Mapping[str, Any], begun: Mapping[str, Any]) -> list[str]:
    nothing = object()
    return [
        f"{name.removeprefix('config.')} is {_show(now, name)} here and {_show(begun, name)} in the run"
        for name in {**now, **begun}
        if now.get(name, nothing) != begun.get(name, nothing)
    ]


def _show(values: Mapping[str, Any], name: str) -> str:
    return short_json(values[name]) if name in values else "not there"
