"""Reads the configuration of a run from its directory, checks its types, and compares it with checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rollmill.core.errors import CheckpointError
from rollmill.core.json_data import short_json
from rollmill.core.schema import read_as
from rollmill.record.json_files import plain
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.earlier_versions import with_added
from rollmill.runs.options import RunOptions
from rollmill.runs.specification import config_from_json

IDENTITY = "run"
"""Entry of a checkpoint's metadata with the part of the configuration that determines what the run learns."""

CHANGEABLE = (
    *("total_timesteps", "learning_rate", "update_epochs", "num_minibatches", "max_grad_norm", "target_kl"),
    *("gamma", "gae_lambda", "ent_coef", "vf_coef", "clip_coef", "clip_vloss", "norm_adv"),
    *("num_simulations", "td_lambda", "weight_decay"),
    *("rms_decay", "rms_eps", "clip_rho", "clip_c", "vtrace_lambda", "tau", "start_epsilon", "end_epsilon"),
    *("exploration_noise", "target_noise", "target_noise_clip"),
)
"""Hyperparameters that may change when a run is resumed, since the shapes of its state do not depend on them."""

DECIDING_OPTIONS = ("seed", "num_seeds", "numerics")
DERIVED = ("fingerprint",)
"""Settings of a graph that follow from its program, and may differ between versions of Rollmill."""

MAX_LAUNCH = 2**16


@dataclass(frozen=True)
class Change:
    """Hyperparameters that were changed when a run was resumed."""

    iteration: int
    """Number of iterations before the change."""
    before: dict[str, Any]
    """Values before the change, by name."""
    after: dict[str, Any]
    """Values after the change, by name."""
    source: str | None = None
    """Member whose weights were copied at the same time, or None if the run continued with its own weights."""

    def to_json(self) -> dict[str, Any]:
        """Returns the change in the form that config.json contains."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class GroupLaunches:
    """Launch configurations of the kernels of one group of a run."""

    device: str
    rollouts: tuple[int, ...] | None = None
    gradients: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SavedLaunches:
    """Launch configurations of the kernels of a run, for one program or for each group."""

    device: str | None = None
    rollouts: tuple[int, ...] | None = None
    gradients: tuple[int, ...] | None = None
    groups: dict[str, GroupLaunches] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphSettings:
    """The settings that graphs of all algorithms have in common. An algorithm may add further settings."""

    algorithm: str
    environment: str
    config: dict[str, Any]
    custom: tuple[str, ...] = ()
    environment_options: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None


@dataclass(frozen=True)
class SavedConfig:
    """The content of config.json. Entries without a field here are only for human readers."""

    graph: dict[str, Any]
    options: dict[str, Any]
    imports: tuple[str, ...]
    plan: dict[str, Any] | None = None
    launches: SavedLaunches | None = None
    changes: tuple[Change, ...] = ()
    import_files: dict[str, str] = field(default_factory=dict)
    """Files of the modules that the run imported and that are not installed."""


@dataclass(frozen=True)
class Summary:
    """The entries of summary.json that Rollmill reads back."""

    status: Literal["finished", "stopped"]
    iterations: int
    total_env_steps: int
    seconds: float
    steps_per_second: float
    compile_seconds: float | None = None
    final_return: float | None = None
    best_return: float | None = None
    final_returns: dict[str, float] = field(default_factory=dict)
    """Mean return of each agent kind, if there are several kinds."""
    stopped_by: str | None = None
    """A signal, or a hook."""
    stop_reason: str | None = None
    """The reason that a hook gave for stopping the run."""


def read_saved(run: RunDirectory) -> SavedConfig:
    """Reads the configuration of a run. Raises a `CheckpointError` that names file, field and value if it is
    invalid.
    """
    config, where = run.read_config(), str(run.config_file)
    if missing := {"graph", "options", "imports"} - config.keys():
        raise CheckpointError(f"{where} has no {', '.join(sorted(missing))}. Is this a Rollmill run?")
    saved = _read_known(SavedConfig, config, where)
    graph = _read_known(GraphSettings, saved.graph, where, field="graph")
    graph = replace(graph, config=with_added(graph.algorithm, graph.config))
    saved = replace(saved, graph={**saved.graph, "config": graph.config})
    if graph.algorithm in ALGORITHMS and not graph.custom:
        config_from_json(ALGORITHMS[graph.algorithm].config, graph.config, where=where, field="graph.config")
    _check_launches(saved.launches, where)
    return saved


def _check_launches(launches: SavedLaunches | None, where: str) -> None:
    """Raises a `CheckpointError` if a number of launches is not within its limits."""
    if launches is None:
        return
    found = {"launches": launches, **{f"launches.groups.{name}": each for name, each in launches.groups.items()}}
    for place, each in found.items():
        for name in ("rollouts", "gradients"):
            for number in getattr(each, name) or ():
                if not 0 <= number <= MAX_LAUNCH:
                    raise CheckpointError(
                        f"{where}: {place}.{name} is {number}, expected a launch setting of at most {MAX_LAUNCH}."
                    )


def read_options(run: RunDirectory) -> RunOptions:
    """Reads the options that a run was started with.

    Raises a `CheckpointError` if its configuration has another version, or if an option has an invalid value.
    """
    where = str(run.config_file)
    options = config_from_json(RunOptions, read_saved(run).options, where=where, field="options")
    return replace(options, run_dir=run.root)


def read_summary(run: RunDirectory) -> dict[str, Any] | None:
    """Reads the summary of a run. Returns None if there is no summary yet.

    Raises a `CheckpointError` that names file, field and value if it is damaged.
    """
    summary, where = run.read_summary(), str(run.summary_file)
    if summary is not None:
        try:
            _read_known(Summary, summary, where)
        except CheckpointError as error:
            hint = f"hint: move it away. `rollmill resume {run.root}` then writes it anew."
            raise CheckpointError(f"{error} {hint}") from error
    return summary


def _read_known(kind: Any, values: Mapping[str, Any], where: str, *, field: str = "") -> Any:
    """Returns the fields of a schema, of an object that may have more."""
    known = {name: values[name] for name in kind.__dataclass_fields__ if name in values}
    return read_as(kind, known, where=where, field=field, error=CheckpointError)


# --- which configuration a checkpoint belongs to --------------------------------------------------------


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of config.json that determines what a run learns, as a flat mapping from names to
    values.
    """
    graph = {name: value for name, value in config["graph"].items() if name not in DERIVED}
    options = {name: config["options"].get(name) for name in DECIDING_OPTIONS}
    return flat("", plain({**graph, **options}))


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Flattens nested JSON objects to one mapping with dotted names after `prefix`. An empty object stays
    a value.
    """
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    parts = {name: flat(f"{prefix}.{name}" if prefix else name, part) for name, part in value.items()}
    return {name: leaf for part in parts.values() for name, leaf in part.items()}


def undone(identity: Mapping[str, Any], changes: tuple[Change, ...]) -> dict[str, Any]:
    """Undoes changes in the identity of a run, which is the part of its configuration that determines what it
    learns.
    """
    values = dict(identity)
    for change in reversed(changes):
        values |= {f"config.{name}": value for name, value in change.before.items()}
    return values


def check_identity(
    run: RunDirectory, metadata: Mapping[str, Any], iteration: int, *, given: Mapping[str, Any] | None = None
) -> None:
    """Raises a `CheckpointError` if a checkpoint belongs to another configuration than the run's.

    Checkpoints from before a recorded change also belong to the run. The hyperparameters `given` are about to
    change, so they may differ. The error names the fields and both values.
    """
    changes = read_saved(run).changes  # also checks all types
    saved, current = metadata.get(IDENTITY), identity_of(run.read_config())
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"checkpoint {iteration} in {run.checkpoints.path} does not say which configuration it belongs to."
        )
    later = tuple(change for change in changes if change.iteration >= iteration)
    candidates = [undone(current, later[start:]) for start in range(len(later) + 1)]
    differing = [_differences(saved, candidate, given or {}) for candidate in candidates]
    if not all(differing):
        return
    names = differing[-1]
    lines = [f"{name} is {_show(current, name)} now and was {_show(saved, name)}" for name in names]
    raise CheckpointError(
        f"{run.config_file} is not the configuration of checkpoint {iteration}: {'; '.join(lines)}. "
        f"{_hint(run, names, current)}"
    )


def _differences(saved: Mapping[str, Any], found: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    missing = object()
    names = [name for name in {**found, **saved} if name.removeprefix("config.") not in given]
    return [name for name in names if saved.get(name, missing) != found.get(name, missing)]


def _show(values: Mapping[str, Any], name: str) -> str:
    return short_json(values[name]) if name in values else "not there"


def _hint(run: RunDirectory, names: list[str], current: Mapping[str, Any]) -> str:
    plain_names = [name.removeprefix("config.") for name in names]
    if all(name.startswith("config.") for name in names) and set(plain_names) <= set(CHANGEABLE):
        sets = " ".join(f"--set {name}={short_json(current[f'config.{name}'])}" for name in plain_names)
        return f"hint: restore the old values, or change them on purpose: rollmill resume {run.root} {sets}"
    return "hint: restore the old values. If the checkpoint came from another run, move it out of the directory."


def with_changes(config: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """Returns the content of config.json with these changes as its history."""
    return {**config, "changes": [change.to_json() for change in changes]}


def changed_config(config: Mapping[str, Any], graph: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Returns the content of config.json for a run that is resumed with other hyperparameters."""
    history = [*config.get("changes", ()), change.to_json()]
    launches = None if {"num_minibatches"} & change.after.keys() else config.get("launches")
    return {**config, "graph": dict(graph), "launches": launches, "changes": history}
