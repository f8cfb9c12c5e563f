"""Creates run directories, each with a name, the configuration, and the provenance of the code."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.git import commit_of
from rollmill.core.imports import files_of_modules
from rollmill.core.machine import hardware, own_commit, versions
from rollmill.planning.plan import Plan
from rollmill.programs.kernels import Launches
from rollmill.record.run_directory import RunDirectory, name_run
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import read_saved
from rollmill.runs.trust import named_modules, names_to_remember, remember

UNRECORDED = ("run_dir", "resume_if_exists", "track", "dashboard", "quiet", "plan")


def provenance_now() -> dict[str, Any]:
    """Returns the package versions, the hardware and the commits with which a run begins."""
    commits = {"rollmill": own_commit(), "working_directory": commit_of()}
    return {"versions": versions(), "hardware": hardware(), "commits": commits}


def create_run(
    config: dict[str, Any], options: RunOptions, provenance: dict[str, Any] | None = None
) -> RunDirectory:
    """Creates a run directory. If an automatically chosen name is taken, a number is appended.

    By default, the current provenance is recorded. Raises a `UsageError` if the directory chosen by the user is
    occupied.
    """
    root = run_root(config["graph"], options)
    provenance = provenance or provenance_now()
    names = (root.name, *(f"{root.name}-{n}" for n in range(2, 100))) if options.run_dir is None else ()
    run = None
    for name in names:
        with contextlib.suppress(UsageError):
            run = RunDirectory.create(root.with_name(name), config=config, versions=provenance)
            break
    run = run or RunDirectory.create(root, config=config, versions=provenance)
    remember(run, names_to_remember(read_saved(run)))
    return run


def run_root(described: dict[str, Any], options: RunOptions) -> Path:
    """Returns the path of a run directory, as chosen in the options or by default."""
    if options.run_dir is not None:
        return Path(options.run_dir)
    return name_run(described["algorithm"], described["environment"], seed=options.seed, now=datetime.now())


def run_config(
    described: dict[str, Any],
    options: RunOptions,
    imports: Sequence[str],
    plan: Plan,
    launches: Launches | None,
    recipe: str | None,
) -> dict[str, Any]:
    """Returns the content of config.json for a new run."""
    recorded = recorded_options(options)
    named = named_modules(described["environment"], recorded, imports, distribution=True)
    return {
        "graph": described,
        "options": recorded,
        "imports": list(imports),
        "import_files": files_of_modules(each.module for each in named),
        "plan": plan.to_json(),
        "launches": launches,
        "recipe": recipe,
        "command": sys.argv,
    }


def recorded_options(options: RunOptions) -> dict[str, Any]:
    """Returns the options for config.json, without the run directory and display settings."""
    return {name: value for name, value in asdict(options).items() if name not in UNRECORDED}
