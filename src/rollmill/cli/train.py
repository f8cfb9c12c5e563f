"""`rollmill train ALGORITHM ENVIRONMENT [OPTIONS]`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeAlias

import tyro

from rollmill.api import (
    ALGORITHMS,
    PreparedTraining,
    Run,
    RunOptions,
    build_graph,
    find_algorithm,
    import_modules,
    prepare_devices,
    prepare_training,
    unwatched,
)
from rollmill.api import train as train_run
from rollmill.cli.config_file import with_config_file
from rollmill.cli.environment_options import EnvOptions, Transforms, chosen_environment_options
from rollmill.cli.parsing import (
    OptionType,
    flags_and_lists,
    given_options,
    option_types,
    parse,
    parse_known,
    positional_words,
    values_of,
)
from rollmill.cli.searching import SearchOptions, planned
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.plugins import plugins, plugins_named
from rollmill.core.types import NO_OPTIONS, Options
from rollmill.dataflow import Graph
from rollmill.envs import is_on_host
from rollmill.execution.instances import Activity
from rollmill.networks import NetworkConfig, find_network
from rollmill.planning import settings_of
from rollmill.recipes import RECIPES
from rollmill.record import RunDirectory

Imports = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="import",
        metavar="MODULE",
        help="Module to import first, because it registers the environment, the network or the algorithm.",
    ),
    tyro.conf.UseAppendAction,
]

NetworkName = Annotated[
    str | None,
    tyro.conf.arg(
        name="network",
        metavar="NAME",
        help="Registered network instead of the one that --network.torso and its like describe; `rollmill list` "
        "shows them.",
    ),
]

Trust = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""Whether a run may import the modules that it names."""


Field: TypeAlias = tuple[str, Any, Any]
"""Name, type and default of a field."""


def run(arguments: list[str]) -> int:
    """Trains, and says where the run is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    with planned(with_config_file(arguments, types_of_options)) as words:
        given, _ = parse_training(words)
        prepare_devices(given.options, environment=given.chosen.environment)
        graph = given.graph_of(None)
        chosen = given.chosen
        return report(train_run(graph, chosen.run, imports=chosen.imports, recipe=chosen.recipe))


def prepare(words: list[str]) -> PreparedTraining:
    """Checks and compiles the training of these arguments to measure it; nothing is written or evaluated."""
    given, _ = parse_training(words)
    prepare_devices(given.options, environment=given.chosen.environment)
    chosen = given.chosen
    options = unwatched(chosen.run)
    return prepare_training(given.graph_of(None), options, imports=chosen.imports, recipe=chosen.recipe)


@dataclass(frozen=True)
class GivenTraining:
    """The arguments of a training."""

    algorithm: str
    chosen: Any
    """The parsed options."""
    rest: Sequence[str]
    """All arguments after the algorithm."""

    @property
    def options(self) -> RunOptions:
        """How it is run."""
        return self.chosen.run

    @property
    def searching(self) -> SearchOptions:
        """How its plan is searched for."""
        return self.chosen.searching

    @property
    def total_timesteps(self) -> int:
        """Environment steps by its hyperparameters; 0 where they name none."""
        return getattr(self.chosen.hyperparameters, "total_timesteps", 0)

    def graph_of(self, num_envs: int | None, *, total_timesteps: int | None = None) -> Graph:
        """The graph with a number of environments, or with that of the arguments or of their plan.

        Args:
            num_envs: the number; None: as the arguments say.
            total_timesteps: number of environment steps; None: as the arguments say.

        Raises:
            UsageError: the algorithm has no such number, or cannot be built.
        """
        chosen = self.chosen
        import_modules(chosen.imports)
        of_recipe = _options_of_recipe(chosen.recipe, chosen.environment)
        config = with_network(chosen.hyperparameters, chosen.network_name)
        planned_envs = None if "num-envs" in given_options(self.rest) else settings_of(chosen.run).num_envs
        if (envs := num_envs or planned_envs) is not None:
            config = with_num_envs(config, envs)
        if total_timesteps is not None:
            config = replace(config, total_timesteps=total_timesteps)
        options = {**of_recipe, **chosen_environment_options(chosen.env_options, chosen.transforms)}
        return build_graph(self.algorithm, chosen.environment, config, options=options)


def parse_training(
    arguments: list[str], *, command: str = "train", more: Field | None = None
) -> tuple[GivenTraining, Any]:
    """Parses the arguments of a training.

    Args:
        arguments: the algorithm, and all that comes after it.
        command: of `rollmill`.
        more: a further field of the command's options.

    Returns:
        The training, and the value of the further field.

    Raises:
        UsageError: they are wrong.
    """
    name, *rest = with_config_file(arguments, types_of_options)
    if name.startswith("-"):
        raise UsageError(f"the algorithm comes before {name}: rollmill {command} ALGORITHM ENVIRONMENT [OPTIONS]")
    find_own_algorithm(name, rest)
    chosen = parse(_arguments(name, rest, more), rest, prog=f"rollmill {command} {name}")
    chosen.searching.check(given_options(rest))
    return GivenTraining(name, chosen, rest), None if more is None else getattr(chosen, more[0])


def with_num_envs(config: Any, num_envs: int) -> Any:
    """The hyperparameters with another number of environments.

    Raises:
        UsageError: they have no such number.
    """
    if not is_dataclass(config) or "num_envs" not in {field.name for field in fields(config)}:
        raise UsageError("the hyperparameters of this algorithm have no num_envs, so that its batch cannot grow.")
    return replace(config, num_envs=num_envs)  # pyright: ignore[reportArgumentType]


class OptionKinds(NamedTuple):
    """Options of an algorithm's training that are not followed by one word."""

    flags: frozenset[str]
    """Given as `--NAME` or `--no-NAME`."""
    lists: frozenset[str]
    """Followed by any number of words."""


def option_kinds(name: str, rest: list[str]) -> OptionKinds:
    """The options of an algorithm that are not followed by one word.

    Args:
        name: the algorithm.
        rest: the arguments of a training, whose imports may register it.
    """
    find_own_algorithm(name, rest)
    flags, lists = flags_and_lists(_arguments(name, rest), prog="rollmill train")
    return OptionKinds(frozenset(flags), frozenset(lists))


def types_of_options(name: str, rest: list[str]) -> dict[str, OptionType]:
    """The types of the options of an algorithm's training, by their names.

    Args:
        name: the algorithm.
        rest: the arguments of a training, whose imports may register it.
    """
    find_own_algorithm(name, rest)
    return option_types(_arguments(name, rest))


def check_arguments(name: str, rest: list[str], *, who: str) -> Any:
    """Checks the arguments of a training of a sweep, without beginning it, and returns them parsed.

    Args:
        name: the algorithm.
        rest: all that comes after it.
        who: the training, for messages.

    Raises:
        UsageError: they are wrong.
    """
    try:
        find_own_algorithm(name, rest)
        chosen = parse(_arguments(name, rest), rest, prog=f"rollmill train {name}")
        chosen_environment_options(chosen.env_options, chosen.transforms)
        if chosen.run.memory_fraction is not None:
            raise UsageError("--memory-fraction has no effect: trials divide a GPU's memory. hint: leave it out.")
        return chosen
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from error


def find_own_algorithm(name: str, rest: list[str]) -> None:
    """Makes sure that an algorithm is known, if by importing the modules of `--import`, or an installed package.

    What these compute with JAX when they are imported has to find the devices that the options ask for.

    Raises:
        UsageError: no module registers it.
    """
    modules = values_of("--import", rest)
    if name not in ALGORITHMS and (modules or plugins_named("algorithm", name)):
        if not {"-h", "--help"} & set(rest):
            options = parse_known(RunOptions, rest, prog=f"rollmill train {name}")
            prepare_devices(options, environment=_environment_named(rest, name))
        import_modules(modules)
    find_algorithm(name)


def _environment_named(rest: list[str], name: str) -> str:
    """The environment on the host that is trained on; empty if it is another one.

    The options of an algorithm that is not known yet may be among the arguments: the word after one is its value.
    """
    words = positional_words(RunOptions, rest, prog=f"rollmill train {name}")
    follows = {after for before, after in pairwise(rest) if before.startswith("--") and "=" not in before}
    named = rest[:1] if rest and not rest[0].startswith("-") else [word for word in words if word not in follows]
    return named[0] if named and is_on_host(named[0]) else ""


def with_network(config: Any, name: str | None) -> Any:
    """The hyperparameters with the registered network of that name, where one is given.

    Raises:
        UsageError: the algorithm has no setting for a network.
    """
    if name is None:
        return config
    find_network(name)
    if not isinstance(getattr(config, "network", None), NetworkConfig):
        raise UsageError(f"--network {name}: the hyperparameters of this algorithm have no network.")
    return replace(config, network=replace(config.network, name=name))


def report(run: Run) -> int:
    """Says where a run is and what can be done with it; returns the exit code."""
    summary = run.summary
    if summary["status"] == "finished" or "stop_reason" in summary:
        final = summary["final_return"]
        print(
            f"{summary['total_env_steps']:,} steps in {summary['seconds']:.1f} s "
            f"({summary['steps_per_second']:,.0f} steps/s), compiled in {summary['compile_seconds']:.1f} s, "
            f"{'no episode ended' if final is None else f'final return {final:.4g}'}"
        )
        for gpu in summary.get("gpus", ()):
            activity = Activity(**{name: value for name, value in gpu.items() if name != "gpu"})
            print(f"GPU {gpu['gpu']}, all of its processes: {activity}")
        if (evaluated := summary.get("evaluation_return")) is not None:
            print(f"last evaluation {evaluated:.4g}, best {summary['best_evaluation_return']:.4g}")
        print(f"run: {run.directory}")
        print(f"evaluate it: {RunDirectory(run.directory).command('evaluate')}")
    return run.exit_code


def _arguments(name: str, rest: list[str], more: Field | None = None) -> type:
    """The command's options; hyperparameters start from a recipe where one is named."""
    config = _recipe_config(name, rest) or ALGORITHMS[name].config()
    merged = tyro.conf.arg(name="")
    return make_dataclass(
        "Train",
        [
            (
                "environment",
                Annotated[tyro.conf.Positional[str], _ENVIRONMENT],
            ),
            ("env_options", EnvOptions, ()),
            ("transforms", Transforms, ()),
            ("network_name", NetworkName, None),
            ("config", Annotated[str | None, tyro.conf.arg(help=_CONFIG, metavar="FILE")], None),
            ("recipe", Annotated[str | None, tyro.conf.arg(help=_RECIPE, metavar="NAME")], None),
            ("imports", Imports, ()),
            *([more] if more else []),
            ("searching", Annotated[SearchOptions, merged], SearchOptions()),
            ("hyperparameters", Annotated[type(config), merged], config),
            ("run", Annotated[RunOptions, merged], RunOptions()),
        ],
        frozen=True,
    )


_ENVIRONMENT = tyro.conf.arg(metavar="ENVIRONMENT", help="Id of the environment; `rollmill list` shows them.")
_CONFIG = "Options from a TOML file or from a run's config.json; those given here come before them."
_RECIPE = "Start from a recipe's hyperparameters and options of the environment; `rollmill list` shows them."


def _recipe_config(algorithm: str, rest: list[str]) -> Any:
    if not (names := values_of("--recipe", rest)):
        return None
    name = names[-1]
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    recipe = RECIPES[name]()
    if recipe.algorithm != algorithm:
        raise UsageError(f"recipe {name!r} is for {recipe.algorithm}, not for {algorithm}.")
    return recipe.config


def _options_of_recipe(name: str | None, environment: str) -> Options:
    """Options of the environment by a recipe; says so where it was made for another environment, and has none."""
    if name is None:
        return NO_OPTIONS
    recipe = RECIPES[name]()
    if recipe.environment == environment:
        return recipe.env_options
    print(f"note: the recipe {name} was made for {recipe.environment}, not for {environment}", file=sys.stderr)
    return NO_OPTIONS


def _usage() -> str:
    offered = [(plugin.name, f"of the package {plugin.package}") for plugin in plugins("algorithm")]
    rows = [*((name, algorithm.summary) for name, algorithm in ALGORITHMS.items()), *offered]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {summary}" for name, summary in rows]
    head = ["usage: rollmill train ALGORITHM ENVIRONMENT [OPTIONS]", "", "algorithms:"]
    more = "`rollmill train ALGORITHM --help` lists its options; `rollmill list` the environments."
    return "\n".join([*head, *lines, "", more])
