"""A run opened again: the graph that its configuration describes, checked before anything of it is used."""

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

    Args:
        run: the run.
        algorithm: the graph again; nothing that the run names is imported then.
        imports: modules that the user names.
        trust: let this directory's run import what it names, now and later.

    Raises:
        CheckpointError: if the configuration is damaged, or names modules that nobody allowed.
        UsageError: if `algorithm` has other hyperparameters.
    """
    saved, options = read_saved(run), read_options(run)
    modules = imports if algorithm else approved_imports(run, saved, imports=imports, trust=trust)
    return open_graph(saved.graph, saved.imports, algorithm=algorithm, modules=modules), options


def open_graph(
    settings: Mapping[str, Any], imported: Sequence[str], *, algorithm: Graph | None, modules: Sequence[str]
) -> Graph:
    """Returns the graph of these settings, or the one that was passed again.

    Args:
        settings: settings of the graph, as config.json has them.
        imported: modules that the run was started with, for messages.
        algorithm: the graph again.
        modules: to import first.

    Raises:
        UsageError: if `algorithm` has other hyperparameters.
    """
    import_modules(modules)
    if algorithm is None:
        return rebuild_graph(dict(settings), imported=imported)
    check_same_config(algorithm, dict(settings))
    return algorithm
