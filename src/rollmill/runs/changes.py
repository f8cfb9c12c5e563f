"""Changes hyperparameters when a run is resumed. Hyperparameters that determine the shapes of its state cannot
be changed.
"""

import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rollmill.algorithms.hyperparameters import scheduled_in
from rollmill.core.bounds import scheduled_fields
from rollmill.core.errors import UsageError
from rollmill.core.json_data import short_json
from rollmill.core.schedules import NumberSchedule, parse_schedule
from rollmill.core.schema import coerce
from rollmill.core.setting_names import unknown_setting
from rollmill.core.text_values import read_value
from rollmill.dataflow import Graph, Loops, first_learning_iteration
from rollmill.record.checkpoints import Restored
from rollmill.record.display import Display
from rollmill.record.json_files import plain
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.saved_run import CHANGEABLE, IDENTITY, Change, changed_config, identity_of, read_saved
from rollmill.runs.specification import config_from_json, find_algorithm
from rollmill.runs.trust import rewrite_config

_REASONS = {"learning_rate": "the learning rate is annealed"}

COUNTED = ("update_epochs", "num_minibatches")
"""Hyperparameters on which the number of updates per iteration depends, which schedules count."""


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """Parses `name=value` arguments of the command line. Raises a `UsageError` for other strings and for repeated
    names.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text} must be NAME=VALUE. hint: use --set learning_rate=1e-4, for example.")
        if name in values:
            raise UsageError(f"--set {name} was given twice.")
        values[name.replace("-", "_")] = value
    return values


def changed_settings(
    settings: Mapping[str, Any], changes: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings of a graph with changed hyperparameters, and the changes in the form in which a run
    records them.

    Strings are parsed as values of the hyperparameter's type. Raises a `UsageError` if a name is unknown or cannot
    be changed, or if a value does not fit. The error mentions `where` the settings come from.
    """
    if not changes:
        return dict(settings), {}
    kind = find_algorithm(settings["algorithm"]).config
    config = config_from_json(kind, settings["config"], where=where, field="graph.config")
    known = {field.name for field in fields(kind)}
    for name in changes:
        if name not in known:
            able = [n for n in CHANGEABLE if n in known]
            raise unknown_setting("hyperparameter", name, able)
        if name not in CHANGEABLE:
            able = ", ".join(n for n in CHANGEABLE if n in known)
            raise UsageError(
                f"{name} cannot be changed in a resumed run, because the run's state depends on it. These can be "
                f"changed: {able}. hint: start a new run with it."
            )
    hints = typing.get_type_hints(kind)
    values = {name: _value(name, hints[name], value) for name, value in changes.items()}
    if _follows_updates(config) and (counted := [name for name in COUNTED if name in values]):
        raise UsageError(
            f"{' and '.join(counted)} cannot be changed while anneal_lr is on or a hyperparameter has a "
            "schedule, because schedules follow the number of updates and would jump. hint: start a new run "
            "instead."
        )
    changed = replace(config, **values)
    if _rate_follows_updates(config) != _rate_follows_updates(changed):
        raise UsageError(
            f"learning_rate={values['learning_rate']} cannot be set in this run: with anneal_lr off, its state "
            "counts updates only if the learning rate is a schedule. hint: give "
            f"{'constant:VALUE' if _rate_follows_updates(config) else 'a number'}."
        )
    written = plain({name: _as_json_value(value) for name, value in values.items()})
    return {**settings, "config": {**settings["config"], **written}}, {
        name: getattr(changed, name) for name in values
    }


def _follows_updates(config: Any) -> bool:
    """Returns whether a hyperparameter depends on the number of updates."""
    return _rate_follows_updates(config) or any(
        isinstance(getattr(config, name), str) for name in scheduled_fields(type(config))
    )


def _rate_follows_updates(config: Any) -> bool:
    """Returns whether the learning rate depends on the number of updates, which its optimiser counts then."""
    return getattr(config, "anneal_lr", False) or isinstance(getattr(config, "learning_rate", None), str)


def check_end(loops: Loops, iteration: int, values: Mapping[str, Any]) -> None:
    """Raises a `UsageError` if the run has already made more steps than the changed `values` allow."""
    if "total_timesteps" in values and loops.iterations < iteration:
        done = iteration * loops.batch_size
        raise UsageError(
            f"total_timesteps={values['total_timesteps']} must be more than the {done} steps that the run has "
            "already made."
        )


def note_changes(
    run: RunDirectory,
    described: Mapping[str, Any],
    graph: Graph,
    values: Mapping[str, Any],
    restored: Restored | None,
    display: Display,
) -> None:
    """Records changed hyperparameters in the run's configuration, and shows the changes to the user.

    `described` is the description of the changed graph. A new value that equals the old one is not a change.
    """
    if restored:
        _note_earlier_start(run, restored, display)
    if not values:
        return
    config, done = run.read_config(), restored.iteration if restored else 0
    identity = restored.metadata[IDENTITY] if restored else identity_of(config)
    old = {name: identity.get(f"config.{name}") for name in values}
    new = {name: described["config"][name] for name in values}
    changed = {name: value for name, value in plain(new).items() if value != old[name]}
    if not changed:
        display.note("the run already has these hyperparameters. Nothing was changed.")
        return
    change = Change(done, {name: old[name] for name in changed}, changed)
    rewrite_config(run, changed_config(config, described, change))
    lines = [f"{name} {short_json(old[name])} -> {short_json(value)}" for name, value in changed.items()]
    display.note(f"changed after iteration {done}: {', '.join(lines)}")
    earlier = {**described["config"], **change.before}
    for note in schedule_notes(earlier, described["config"], graph, done):
        display.note(note)


def schedule_notes(before: Mapping[str, Any], after: Mapping[str, Any], graph: Graph, done: int) -> Iterator[str]:
    """Yields a note on each value that jumps in a resumed run, because the ends of its schedule have changed.

    `before` and `after` are the hyperparameters before and after the change, and `done` is the number of completed
    iterations.
    """
    kind = find_algorithm(graph.settings["algorithm"]).config
    for name in sorted(scheduled_fields(kind)):
        if note := _schedule_note(name, before, after, graph, done):
            yield note
    yield from _environment_notes(before, after, graph, done)
    yield from _exploration_notes(before, after, graph, done)


def _note_earlier_start(run: RunDirectory, restored: Restored, display: Display) -> None:
    """Prints that the run resumes from before a change, because the checkpoints after the change are damaged."""
    config, changes = run.read_config(), read_saved(run).changes
    late = [change for change in changes if change.iteration > restored.iteration]
    if not late:
        return
    for change in late:
        display.note(
            f"note: the change of {', '.join(change.after)} after iteration {change.iteration} takes effect "
            f"after iteration {restored.iteration} instead, because no checkpoint from then on remains"
        )
    moved = [replace(change, iteration=min(change.iteration, restored.iteration)) for change in changes]
    rewrite_config(run, {**config, "changes": [change.to_json() for change in moved]})


def note_option(run: RunDirectory, name: str, value: Any) -> None:
    """Records the new value of a run option in the run's configuration."""
    config = run.read_config()
    rewrite_config(run, {**config, "options": {**config["options"], name: value}})


def note_import_files(run: RunDirectory, files: Mapping[str, str]) -> None:
    """Records the files from which a resumed run imported its modules, if they have moved since it began."""
    config = run.read_config()
    if files and files != config.get("import_files"):
        rewrite_config(run, {**config, "import_files": dict(files)})


def note_launches(run: RunDirectory, launches: Mapping[str, Any]) -> None:
    """Records the kernel launches that workers chose first, so that a resumed run uses them.

    Groups choose one after another, and each group keeps its first launch configurations.
    """
    config = run.read_config()
    before = config.get("launches") or {}
    kept = {**launches, **before}
    if "groups" in launches:
        kept["groups"] = {**launches["groups"], **before.get("groups", {})}
    if kept != before:
        rewrite_config(run, {**config, "launches": kept})


def _schedule_note(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], graph: Graph, done: int
) -> str | None:
    """Returns the jump of a scheduled value if its ends have changed."""
    if not {"total_timesteps", name} <= after.keys():
        return None
    waiting = first_learning_iteration(graph)  # no schedule continues before learning begins
    ends = _last_iterations(before, after, graph)
    if after[name] is None:
        return None
    schedules = [_schedule(name, config) for config in (before, after)]
    if schedules[1].shape == "constant" or (ends[0], schedules[0]) == (ends[1], schedules[1]):
        return None
    shares = [max(done - waiting, 0) / max(end - waiting, 1) for end in ends]
    rates = [float(schedule.at(share)) for schedule, share in zip(schedules, shares, strict=True)]
    told = _REASONS.get(name, f"{name} has a schedule")
    return _jump(told, rates[0], rates[1], schedules[1].last, ends[1])


def _environment_notes(
    before: Mapping[str, Any], after: Mapping[str, Any], graph: Graph, done: int
) -> Iterator[str]:
    """Yields the jump of each scheduled parameter of the environment if the end of the run has moved."""
    ends = _last_iterations(before, after, graph)
    for name, schedule in scheduled_in(graph.parameters):
        if ends[0] != ends[1] and schedule.shape != "uniform":
            old, new = (float(schedule.at(done / end)) for end in ends)
            yield _jump(f"{name} of the environment has a schedule", old, new, schedule.last, ends[1])


def _exploration_notes(
    before: Mapping[str, Any], after: Mapping[str, Any], graph: Graph, done: int
) -> Iterator[str]:
    """Yields the jump of the share of random actions if the end of the run has moved."""
    names = ("exploration_fraction", "start_epsilon", "end_epsilon")
    if not all(isinstance(config.get(name), int | float) for config in (before, after) for name in names):
        return
    steps = done * graph.loops.batch_size
    spans = [max(config["exploration_fraction"] * config["total_timesteps"], 1) for config in (before, after)]
    old, new = (
        config["start_epsilon"] + min(steps / span, 1) * (config["end_epsilon"] - config["start_epsilon"])
        for config, span in zip((before, after), spans, strict=True)
    )
    if spans[0] != spans[1] and old != new:
        last = math.ceil(spans[1] / graph.loops.batch_size)
        yield _jump("the share of random actions has a schedule", old, new, after["end_epsilon"], last)


def _last_iterations(before: Mapping[str, Any], after: Mapping[str, Any], graph: Graph) -> list[int]:
    return [-(-config["total_timesteps"] // graph.loops.batch_size) for config in (before, after)]


def _jump(told: str, old: float, new: float, last: float, end: int) -> str:
    """Returns a note on a scheduled value that continues at `new` instead of `old`."""
    return (
        f"note: {told} over total_timesteps. It continues at {new:.4g} instead of {old:.4g}, and "
        f"{'falls' if last < new else 'changes'} to {last:.4g} after iteration {end}"
    )


def _schedule(name: str, config: Mapping[str, Any]) -> NumberSchedule:
    number = config[name]
    if isinstance(number, str) and ":" in number:
        return parse_schedule(name, number)
    number, annealed = float(number), name == "learning_rate" and config.get("anneal_lr")
    return NumberSchedule("linear", number, 0.0) if annealed else NumberSchedule("constant", number, number)


def _value(name: str, hint: Any, value: Any) -> Any:
    return read_value(name, hint, [value]) if isinstance(value, str) else coerce(name, hint, value)


def _as_json_value(value: Any) -> Any:
    infinite = isinstance(value, float) and value in (float("inf"), -float("inf"))
    return str(value) if infinite else value
