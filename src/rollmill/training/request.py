"""A training request: one value that describes a run, from the command line to the process that trains.

The command line parses its arguments into a `TrainingRequest`. Sweeps and plan searches change the settings of a
request, and processes receive a request as JSON. Nothing is imported or built before a request is resolved.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from rollmill.algorithms.sizes import check_config_sizes
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.json_data import writable
from rollmill.core.options import Option, options_of, with_values
from rollmill.core.plugins import plugins_named
from rollmill.core.schema import read_as
from rollmill.core.setting_names import unknown_setting
from rollmill.core.text_values import count_of, read_value
from rollmill.dataflow import Graph
from rollmill.envs import is_on_host, parse_options
from rollmill.networks import find_network
from rollmill.planning.choose import settings_of
from rollmill.record.json_files import plain
from rollmill.runs.algorithms import ALGORITHMS, find_algorithm
from rollmill.runs.options import RunOptions
from rollmill.runs.specification import build_graph, import_modules
from rollmill.runs.trust import cluster_name, start_name
from rollmill.training.evaluations import without_evaluations
from rollmill.training.placing import prepare_devices
from rollmill.training.training import PreparedTraining, Run, prepare_training, train

ENVIRONMENT, ENV_OPTION_PREFIX = "environment", "env-option."
"""Names that a sweep may vary in addition to settings: the environment, and its options."""
NETWORK = "network.name"
MAX_SEEDS = 2**14
"""Maximum number of seeds in one run."""


@dataclass(frozen=True)
class TrainingRequest:
    """Names of an algorithm and an environment, with all explicitly given settings."""

    algorithm: str
    environment: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters and options of the run by name: `learning_rate`, `network.hidden_sizes`, `seed`."""
    environment_options: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    """Modules to import first, because they register one of the names."""
    recipe: str | None = None
    """Recipe whose hyperparameters replace the algorithm's defaults."""

    def changed(self, settings: Mapping[str, Any]) -> "TrainingRequest":
        """Returns the request with other values of some settings."""
        return replace(self, settings={**self.settings, **settings})

    def without(self, names: Collection[str]) -> "TrainingRequest":
        """Returns the request without the named settings, which then have their default values."""
        kept = {name: value for name, value in self.settings.items() if name not in names}
        return replace(self, settings=kept)

    def at(self, point: Mapping[str, Any]) -> "TrainingRequest":
        """Returns the request with the values of a sweep's point.

        A point maps options to values: settings of the run or the algorithm, `environment`, and `env-option.KEY`.
        A `seed` such as `0..4` means all of these seeds in one program. Raises a `UsageError` if seeds are
        invalid.
        """
        request = self
        for option, value in point.items():
            if option == ENVIRONMENT:
                request = replace(request, environment=value)
            elif option.startswith(ENV_OPTION_PREFIX):
                key = option.removeprefix(ENV_OPTION_PREFIX)
                request = replace(request, environment_options={**request.environment_options, key: value})
            elif option == "seed" and (seeds := seeds_of(value)) is not None:
                request = request.changed({"seed": seeds.start, "num_seeds": len(seeds)})
            else:
                request = request.changed({setting_name(option): value})
        return request

    @property
    def options(self) -> RunOptions:
        """Returns the options of the run.

        Raises:
            UsageError: a value is invalid for its option.
        """
        return _replace_settings(
            RunOptions(), {n: v for n, v in self.settings.items() if n in _names_in(RunOptions)}
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the request in a form that JSON can hold, and that `read_request` reads."""
        return plain(writable(asdict(self)))


def read_request(value: Any, *, where: str) -> TrainingRequest:
    """Reads a request from parsed JSON.

    Raises a `UsageError` that begins with `where`, its source, if a field is unknown, missing or of another type.
    """
    return read_as(TrainingRequest, value, where=where, error=UsageError)


class ResolvedRequest(NamedTuple):
    """A training request with imported names and typed settings."""

    request: TrainingRequest
    config: Any
    """The algorithm's hyperparameters."""
    options: RunOptions

    @property
    def total_timesteps(self) -> int:
        """Number of environment steps in the hyperparameters, or 0 if they contain none."""
        return getattr(self.config, "total_timesteps", 0)

    @property
    def planned_envs(self) -> int | None:
        """Number of environments in the plan, if the request itself does not set one."""
        return None if "num_envs" in self.request.settings else settings_of(self.options).num_envs

    @property
    def environment_options(self) -> dict[str, Any]:
        """Options of the environment, from the request and its recipe."""
        return {**options_of_recipe(self.request), **self.request.environment_options}

    def graph(self, num_envs: int | None = None, *, total_timesteps: int | None = None) -> Graph:
        """Builds the graph of the request.

        `num_envs` and `total_timesteps` replace the values of the request or its plan. Raises a `UsageError` if
        the algorithm has no such hyperparameter, or if the graph cannot be built.
        """
        request, config = self.request, self.config
        if (envs := num_envs or self.planned_envs) is not None:
            config = _with_num_envs(config, envs)
        if total_timesteps is not None:
            config = replace(config, total_timesteps=total_timesteps)
        return build_graph(request.algorithm, request.environment, config, options=self.environment_options)


def resolve(request: TrainingRequest) -> ResolvedRequest:
    """Imports the modules of a request, looks up its names, and converts its settings to their types.

    Raises a `UsageError` if a name or a setting is unknown, or if a value does not fit its type.
    """
    import_modules(request.imports)
    return with_types(request)


def with_types(request: TrainingRequest) -> ResolvedRequest:
    """Converts the settings of a request to their types, without importing modules. Raises the errors of
    `resolve`.
    """
    options = request.options
    config = default_config(request.algorithm, request.recipe)
    known = _names_in(RunOptions)
    given = {name: value for name, value in request.settings.items() if name not in known}
    _check_network(config, given)
    config = _replace_settings(config, given)
    check_config_sizes(config)
    return ResolvedRequest(request, config, options)


def train_request(request: TrainingRequest) -> Run:
    """Trains a request, with the result and errors of `train`."""
    prepare_devices(request.options, environment=request.environment)
    resolved = resolve(request)
    return train(resolved.graph(), resolved.options, imports=request.imports, recipe=request.recipe)


def prepare_request(request: TrainingRequest) -> PreparedTraining:
    """Checks and compiles the run of a request in order to measure it, without writing files or evaluating."""
    prepare_devices(request.options, environment=request.environment)
    resolved = resolve(request)
    options = without_evaluations(resolved.options)
    return prepare_training(resolved.graph(), options, imports=request.imports, recipe=request.recipe)


def find_own_algorithm(name: str, options: RunOptions | None, imports: Sequence[str], *, environment: str) -> None:
    """Imports modules that may register an unknown algorithm, from the user and installed packages.

    `options` configure the devices before these modules compute with JAX. They are None if nothing will be
    computed. `environment` is the id of the environment, or empty if it is unknown. Raises a `UsageError` if no
    module registers the algorithm.
    """
    if name not in ALGORITHMS and (imports or plugins_named("algorithm", name)):
        if options is not None:
            prepare_devices(options, environment=environment if environment and is_on_host(environment) else "")
        import_modules(imports)
    find_algorithm(name)


def default_config(algorithm: str, recipe: str | None) -> Any:
    """Returns the default hyperparameters of an algorithm, as changed by `recipe` if given.

    Raises a `UsageError` if a name is unknown, or if the recipe is for another algorithm.
    """
    if recipe is None:
        return find_algorithm(algorithm).config()
    found = find_recipe(recipe)
    if found.algorithm != algorithm:
        raise UsageError(f"recipe {recipe!r} is for {found.algorithm}, not for {algorithm}.")
    return found.config


def find_recipe(name: str) -> Any:
    """Returns the `recipes.classic.Recipe` with a name. Raises a `UsageError` if it does not exist."""
    from rollmill.recipes import RECIPES

    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()


def options_of_recipe(request: TrainingRequest) -> Mapping[str, Any]:
    """Returns the environment options of the request's recipe, or no options if the recipe is for another
    environment.
    """
    if request.recipe is None:
        return {}
    recipe = find_recipe(request.recipe)
    return recipe.env_options if recipe.environment == request.environment else {}


def setting_name(option: str) -> str:
    """Converts an option to the name of its setting: `network.hidden-sizes` becomes `network.hidden_sizes`."""
    return NETWORK if option == "network" else option.replace("-", "_")


def setting_from_text(algorithm: str, option: str, texts: Sequence[str]) -> Any:
    """Parses the value of a setting from one string, or from one string for each element of a list.

    `option` names an axis of a sweep: a setting of the algorithm or the run, `environment` or `env-option.KEY`.
    Raises a `UsageError` for an unknown setting or an invalid value.
    """
    if option == ENVIRONMENT:
        return " ".join(texts)
    if option.startswith(ENV_OPTION_PREFIX):
        key = option.removeprefix(ENV_OPTION_PREFIX)
        return parse_options([f"{key}={' '.join(texts)}"], flag="--env-option")[key]
    return read_value(f"--{option}", _setting(algorithm, option).hint, texts)


def takes_several(algorithm: str, option: str) -> bool:
    """Returns whether the value of an option consists of several strings, such as a list of layer sizes."""
    is_setting = option != ENVIRONMENT and not option.startswith(ENV_OPTION_PREFIX)
    return is_setting and count_of(_setting(algorithm, option).hint) != 1


def coerced_setting(algorithm: str, option: str, value: Any) -> Any:
    """Converts a value to the type of a setting. Raises the errors of `setting_from_text`."""
    if option == ENVIRONMENT or option.startswith(ENV_OPTION_PREFIX):
        return value
    return _setting(algorithm, option).coerce(value, name=option)


def seeds_of(value: Any) -> range | None:
    """Returns the seeds in a string of the form `FIRST..LAST`, or None if the value has another form.

    Raises a `UsageError` if there are no seeds, or more than a run can have.
    """
    first, dots, last = value.partition("..") if isinstance(value, str) else ("", "", "")
    if not (dots and first.isdecimal() and last.isdecimal()):
        return None
    seeds = range(int(first), int(last) + 1)
    if not 1 <= len(seeds) <= MAX_SEEDS:
        raise UsageError(f"seed={value} must contain between 1 and {MAX_SEEDS:,} seeds.")
    return seeds


def _setting(algorithm: str, option: str) -> Option:
    name = setting_name(option)
    known = {**_settings_in(RunOptions), **_settings_in(find_algorithm(algorithm).config)}
    if name not in known:
        raise unknown_setting("option", option, [each.replace("_", "-") for each in known])
    return known[name]


@cache
def _settings_in(kind: type) -> dict[str, Option]:
    """Returns the settings of a dataclass, by their names."""
    return {".".join(option.path): option for option in options_of(kind)}


def _names_in(kind: type) -> Collection[str]:
    return _settings_in(kind).keys()


def _replace_settings(instance: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a copy of a dataclass instance with some settings replaced."""
    known = _settings_in(type(instance))
    for name in settings:
        if name not in known:
            raise unknown_setting("setting", name, known)
    return with_values(instance, {known[name].path: known[name].coerce(value) for name, value in settings.items()})


def _check_network(config: Any, settings: Mapping[str, Any]) -> None:
    """Checks a registered network by its name."""
    if (name := settings.get(NETWORK)) is None:
        return
    find_network(name)
    if NETWORK not in _names_in(type(config)):
        raise UsageError(
            f"--network {name} has no effect, because this algorithm has no network among its hyperparameters."
        )


def _with_num_envs(config: Any, num_envs: int) -> Any:
    if not is_dataclass(config) or "num_envs" not in {each.name for each in fields(config)}:
        raise UsageError("this algorithm has no num_envs among its hyperparameters, so its batch cannot grow.")
    return replace(config, num_envs=num_envs)  # pyright: ignore[reportArgumentType]


class NamedCode(NamedTuple):
    """Modules, clusters and object stores that occur in training requests."""

    modules: frozenset[str]
    """Modules to import for distribution policies and environments."""
    clusters: frozenset[str]
    """Addresses of clusters, as names that can be trusted."""
    stores: frozenset[str]
    """Object stores from which runs read initial weights, as names that can be trusted."""


def named_by(requests: Iterable[TrainingRequest]) -> NamedCode:
    """Collects what the user has to trust before the requests run.

    These are modules that the requests import, clusters that run their code, and object stores, which are read
    with the user's credentials.
    """
    modules, clusters, stores = set[str](), set[str](), set[str]()
    for request in requests:
        modules |= {*request.imports, request.environment.partition(":")[2].rpartition(":")[0]}
        policy, cluster, track = (request.settings.get(name) for name in ("distribution", "cluster", "track"))
        trackers = [track] if isinstance(track, str) else track or ()
        modules |= {name.rpartition(":")[0] for name in trackers if isinstance(name, str)}
        if isinstance(policy, str) and ":" in policy:
            modules.add(policy.partition(":")[0])
        if isinstance(cluster, str) and ":" in cluster:
            clusters.add(cluster_name(cluster))
        stores.add(start_name(request.settings.get("start_from")) or "")
    return NamedCode(frozenset(modules - {""}), frozenset(clusters), frozenset(stores - {""}))
