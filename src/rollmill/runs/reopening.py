"""Reopens a run: builds the graph that its configuration describes, after all checks."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.dataflow import Graph
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import read_options, read_saved
from rollmill.runs.specification import check_same_config, import_modules, rebuild_graph
from rollmill.runs.trust import approved_imports


def reopen(
    run: RunDirectory, *, algorithm: Graph | None = None, imports: Sequence[str] = (), trust: bool = False
) -> tuple[Graph, RunOptions]:
    """Returns the algorithm and the options that a run was started with.

    If the graph is passed again as `algorithm`, nothing that the run names is imported. Otherwise, the modules in
    `imports` are imported, and the run's own modules if it is trusted. `trust` trusts the run directory now and
    later. Raises a `CheckpointError` if the configuration is damaged or names modules that are not allowed, and a
    `UsageError` if `algorithm` has other hyperparameters.
    """
    saved, options = read_saved(run), read_options(run)
    modules = imports if algorithm else approved_imports(run, saved, imports=imports, trust=trust)
    return open_graph(saved.graph, saved.imports, algorithm=algorithm, modules=modules), options


def open_graph(
    settings: Mapping[str, Any], imported: Sequence[str], *, algorithm: Graph | None, modules: Sequence[str]
) -> Graph:
    """Returns the graph described by these settings, built after importing `modules`, or the `algorithm` that was
    passed again.

    Messages mention the modules that the run `imported` when it started. Raises a `UsageError` if `algorithm` has
    other hyperparameters.
    """
    import_modules(modules)
    if algorithm is None:
        return rebuild_graph(dict(settings), imported=imported)
    check_same_config(algorithm, dict(settings))
    return algorithm
