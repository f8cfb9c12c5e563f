"""Builds graphs from names and JSON, and describes graphs by the names and JSON that build them again."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollmill.core.errors import CheckpointError, RollmillError, UsageError
from rollmill.core.imports import ImportRefused, import_named
from rollmill.core.json_data import parse_json, writable
from rollmill.core.schema import read_as
from rollmill.core.trace_cache import without_checks
from rollmill.core.types import NO_OPTIONS, Environment, HostEnvironment, Options
from rollmill.core.user_frame import failed_import
from rollmill.dataflow import Graph, fingerprint, fragment_fingerprints
from rollmill.envs import make
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.networks.registry import NETWORKS
from rollmill.record.json_files import plain
from rollmill.runs.algorithms import ALGORITHMS, find_algorithm
from rollmill.runs.digest_cache import recall_digests
from rollmill.runs.equality import certainly_same

_newest: Graph | None = None
"""The last graph that was built from names, which need not be built again to be described."""


def import_modules(names: Sequence[str]) -> None:
    """Imports the modules named by the user, which register environments, networks or algorithms."""
    for name in names:
        try:
            import_named(name)
        except ImportRefused:
            raise
        except Exception as error:  # the user's module can raise anything
            raise UsageError(failed_import(name, error)) from error


def build_graph(algorithm: str, environment: str, config: Any, *, options: Options = NO_OPTIONS) -> Graph:
    """Builds a graph from the names of an algorithm and an environment, and the options of the environment."""
    global _newest
    _newest = find_algorithm(algorithm).build(make(environment, **options), config)
    return _newest


def rebuild_graph(settings: dict[str, Any], *, imported: Sequence[str] = ()) -> Graph:
    """Builds the graph of a run again from its saved settings.

    `imported` are the modules that have been imported for this run. Raises a `CheckpointError` if parts of the
    graph were created in Python without a name, and a `UsageError` if the environment is not registered.
    """
    if custom := settings.get("custom"):
        raise CheckpointError(
            f"this run was created in Python with its own {' and '.join(custom)}, which cannot be stored in a "
            "file. hint: pass the algorithm again in Python, as in rollmill.load(run, algorithm=...), and "
            "likewise to evaluate, resume and replay."
        )
    try:
        return _graph_on(_environment_of(settings), settings)
    except UsageError as error:
        if not imported:
            raise
        hint = " ".join(f"--import {name}" for name in imported)
        raise UsageError(f"{error} The run was started with {hint}.") from error


def graph_of_worker(settings: dict[str, Any], imports: Sequence[str]) -> Graph:
    """Builds the described graph in a worker, after importing `imports` (see `workers.run_spec.RunSpec`)."""
    import_modules(imports)
    return rebuild_graph(settings, imported=imports)


def _environment_of(settings: dict[str, Any]) -> Environment | HostEnvironment:
    return make(settings["environment"], **settings.get("environment_options", {}))


def _graph_on(env: Environment | HostEnvironment, settings: dict[str, Any]) -> Graph:
    algorithm = find_algorithm(settings["algorithm"])
    return algorithm.build(env, config_from_json(algorithm.config, settings["config"], field="graph.config"))


def describe(graph: Graph) -> dict[str, Any]:
    """Returns the settings of a graph as a run records them. Parts that the settings cannot rebuild are listed
    under "custom".

    To find parts that were changed in Python or have no name, the graph is built again from its settings, and both
    graphs are compared, by their parts or, if necessary, by what they compute. This traces at least one of them,
    so describe a graph once and pass the description on. A graph of built-in parts is not built again if
    `build_graph` has just built it.
    """
    settings = writable(graph.settings)
    try:
        plain(settings["config"])
    except TypeError:
        custom = [*settings["custom"], "hyperparameters"]
        return {**settings, "fingerprint": fingerprint(graph), "config": {}, "custom": custom}
    custom = settings["custom"] or _find_changed(graph, settings)
    return {**settings, "fingerprint": fingerprint(graph), "custom": custom}


def _find_changed(graph: Graph, settings: dict[str, Any]) -> list[str]:
    """Returns the parts of a graph that its settings do not rebuild."""
    try:
        find_algorithm(settings["algorithm"])
    except UsageError:
        return ["algorithm"]
    saved = parse_json(json.dumps(plain(settings)), where="settings")
    if graph is _newest and _has_built_in_parts(saved) and _config_of(saved) == graph.settings["config"]:
        recall_digests(graph, saved)
        return []
    return _differences(graph, saved)


def _differences(graph: Graph, saved: dict[str, Any]) -> list[str]:
    """Returns the parts in which a graph differs from the graph that its settings build."""
    try:
        env = _environment_of(saved)
    except RollmillError:
        return ["environment"]
    try:
        with without_checks():
            rebuilt = _graph_on(env, saved)
        if dict(rebuilt.hyperparameters) != dict(graph.hyperparameters):
            return ["hyperparameters"]
        if certainly_same(graph._replace(settings={}), rebuilt._replace(settings={})):
            recall_digests(graph, saved)
            return []
        if fingerprint(rebuilt) == fingerprint(graph):
            return []
    except RollmillError:
        return ["algorithm"]
    if rebuilt.settings["config"] != graph.settings["config"]:
        return ["hyperparameters"]
    mine, named = fragment_fingerprints(graph), fragment_fingerprints(rebuilt)
    return [part for part in mine if mine[part] != named[part]] or ["algorithm"]


def _has_built_in_parts(settings: dict[str, Any]) -> bool:
    """Returns whether the algorithm and the environment are built in, and no network is registered."""
    is_built_in = ALGORITHMS.is_built_in(settings["algorithm"]) and ENVIRONMENTS.is_built_in(
        settings["environment"]
    )
    return is_built_in and not NETWORKS


def _config_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that a graph has when it is built again from its settings."""
    config = find_algorithm(settings["algorithm"]).config
    return asdict(config_from_json(config, settings["config"], field="graph.config"))


def check_same_config(graph: Graph, settings: dict[str, Any]) -> None:
    """Raises a `UsageError` that lists the differences if a graph that was passed again has other hyperparameters
    than the run.
    """
    given = plain(writable(graph.settings))
    for key, what in (("config", "hyperparameters"), ("environment_options", "options of its environment")):
        here, there = given.get(key, {}), settings.get(key, {})
        differ = [
            f"{name}={here.get(name)!r} (the run has {there.get(name)!r})"
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        ]
        if differ:
            raise UsageError(f"the algorithm and the run have different {what}: {', '.join(differ)}.")


def config_from_json(
    config: type, values: dict[str, Any], *, where: str = "the run's configuration", field: str = ""
) -> Any:
    """Builds a configuration dataclass from its fields in JSON, which are the entry `field` of the file `where`.

    Raises a `CheckpointError` if this version does not have a field, or if a field has another type or an
    impossible value.
    """
    try:
        return read_as(config, values, where=where, field=field, error=CheckpointError)
    except UsageError as problem:  # the dataclass's own checks
        raise CheckpointError(f"{where}: {field and f'{field}: '}{problem}") from problem
