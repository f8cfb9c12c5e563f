"""Hooks that send the metrics of a run to the experiment trackers Weights & Biases and MLflow."""

import contextlib
import hashlib
import importlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.installation import install_command
from rollmill.hooks.events import (
    FailureReported,
    Hook,
    MetricsLogged,
    PolicyEvaluated,
    TrainingEvent,
    TrainingFinished,
    TrainingStarted,
    name_hook,
)

STEP = "env_steps"
WANDB_ID = "wandb_id.txt"
"""Name of the file in a run directory with the id of the Weights & Biases run."""
MAX_ID_BYTES = 8192
RUN_TAG = "rollmill.run"
"""Tag of an MLflow run that contains the path of the run directory."""

MAX_PARAMETERS = 100
"""Maximum number of parameters, or of metrics, in one call of MLflow."""

MAX_CHARACTERS = 500
"""Maximum length of a parameter that every version of MLflow accepts."""


def wandb_log(project: str = "rollmill", **settings: Any) -> Hook:
    """Returns a hook that logs a run to Weights & Biases: configuration, metrics over `env_steps`, summary.

    After a resume, logging continues in the same Weights & Biases run. Values that were logged after the
    checkpoint stay there, in addition to the new values for the same steps. `WANDB_MODE=offline` writes only to
    disk.

    Args:
        project: name of the project.
        **settings: further arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

    Raises:
        UsageError: the package is not installed.
    """
    wandb = _import_package("wandb")
    run: Any = None

    def hook(event: TrainingEvent) -> None:
        nonlocal run
        match event:
            case TrainingStarted():
                own = {**_names(event.directory), "id": _wandb_id(event)}
                run = wandb.init(
                    **{"project": project, **own, "resume": "allow", "config": dict(event.config), **settings}
                )
                run.define_metric("*", step_metric=STEP)
            case MetricsLogged() | PolicyEvaluated():
                run.log(dict(numbers_of(event.row)))
            case TrainingFinished():
                run.summary.update(dict(event.summary))
                run.finish(exit_code=0)
            case FailureReported(ends=True) if run is not None:
                run.finish(exit_code=1)

    return name_hook("wandb_log", hook)


def mlflow_log(experiment: str = "rollmill", *, tracking_uri: str | None = None) -> Hook:
    """Returns a hook that logs a run to MLflow: options and hyperparameters, metrics over `env_steps`, and the
    summary as tags.

    After a resume, logging continues in the same MLflow run. Values that were logged after the checkpoint stay in
    MLflow, in addition to the new values for the same steps.

    Args:
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: address of the server, or a local store such as `sqlite:///mlflow.db`. By default, MLflow
            chooses (`MLFLOW_TRACKING_URI`).

    Raises:
        UsageError: the package is not installed.
    """
    mlflow = _import_package("mlflow")
    client = mlflow.MlflowClient(tracking_uri=tracking_uri)
    run_id = ""

    def hook(event: TrainingEvent) -> None:
        nonlocal run_id
        match event:
            case TrainingStarted():
                run_id = _mlflow_run(client, experiment, event)
            case MetricsLogged() | PolicyEvaluated():
                now, step = int(time.time() * 1000), event.env_steps
                metrics = [mlflow.entities.Metric(name, value, now, step) for name, value in numbers_of(event.row)]
                for first in range(0, len(metrics), MAX_PARAMETERS):
                    client.log_batch(run_id, metrics=metrics[first : first + MAX_PARAMETERS])
            case TrainingFinished():
                for name, value in _flat(event.summary):
                    client.set_tag(run_id, f"summary.{name}", value)
                client.set_terminated(run_id, "FINISHED" if event.status == "finished" else "KILLED")
            case FailureReported(ends=True) if run_id:
                client.set_tag(run_id, "failure", event.message[:MAX_CHARACTERS])
                client.set_terminated(run_id, "FAILED")

    return name_hook("mlflow_log", hook)


def _wandb_id(event: TrainingStarted) -> str:
    """Returns the id of a run, which is stored in its directory.

    Two runs with the same path on two machines therefore have different ids. The file also contains the path of
    the directory, so that a copy gets a new id while the original exists. A resumed run of an earlier version
    keeps the id that was derived from its path.
    """
    folder, path = Folder(event.directory), str(event.directory.resolve())
    kept = _read_wandb_id(folder)
    name, _, place = (kept or "").partition("\n")
    if name and (place in ("", path) or not _holds_run(Path(place), name)):
        made = name
    elif not name and event.iteration:
        made = hashlib.sha256(path.encode()).hexdigest()[:16]
    else:
        made = secrets.token_hex(8)
    if kept != f"{made}\n{path}":
        with (
            contextlib.suppress(OSError),
            folder.replacing(WANDB_ID) as file,
        ):  # if the id cannot be stored, a resumed run begins another W&B run
            file.write(f"{made}\n{path}\n".encode())
    return made


def _read_wandb_id(folder: Folder) -> str | None:
    """Returns the id in the directory and a line with the directory's original path, or None without an id."""
    with contextlib.suppress(OSError, RollmillError, UnicodeDecodeError):
        kept = folder.read(WANDB_ID, limit=MAX_ID_BYTES).decode().strip()
        if re.fullmatch(r"\w+(\n/[^\n]*)?", kept):
            return kept
    return None


def _holds_run(directory: Path, name: str) -> bool:
    """Returns whether a directory keeps this id."""
    kept = _read_wandb_id(Folder(directory))
    return kept is not None and kept.partition("\n")[0] == name


def _mlflow_run(client: Any, experiment: str, event: TrainingStarted) -> str:
    """Returns the id of this directory's run, kept when it is resumed."""
    known = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if known is None else known.experiment_id
    path = str(event.directory.resolve())
    quoted = path.replace("'", "\\'")
    found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{quoted}'") if event.iteration else []
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0].info.run_id
    created = client.create_run(experiment_id, run_name=_names(event.directory)["name"], tags={RUN_TAG: path})
    for name, value in _flat({part: event.config.get(part, {}) for part in ("graph", "options")}):
        client.log_param(created.info.run_id, name, value)
    return created.info.run_id


def _names(directory: Path) -> dict[str, str]:
    """Returns the name of a run for a tracker. That of a trial begins with its sweep, which is its group."""
    if directory.parent.name != "trials":
        return {"name": directory.name}
    sweep = directory.absolute().parents[1].name
    return {"name": f"{sweep}/{directory.name}", "group": sweep}


def numbers_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the names and values of all numeric metrics in a line, except undefined ones."""
    for name, value in row.items():
        if isinstance(value, int | float):
            yield name, value


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Returns names with dots, and values as strings that are short enough for MLflow."""
    for name, part in value.items():
        if isinstance(part, Mapping):
            yield from _flat(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(part)[:MAX_CHARACTERS]


def _import_package(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"{package}_log needs the package {package}, which is not installed. hint: {install_command(package)}"
        ) from error
