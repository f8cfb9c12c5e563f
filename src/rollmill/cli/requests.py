"""Parses the arguments of `rollmill train`, and of commands that share its options, into a training request."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from rollmill.cli.config_file import ConfigFile, named_in, read_config_file
from rollmill.cli.parsing import HELP, parse_given, parse_known
from rollmill.cli.plan_search_options import SearchOptions
from rollmill.cli.shared_options import (
    EnvOptions,
    Imports,
    NetworkName,
    Transforms,
    chosen_environment_options,
    merge_environment_options,
)
from rollmill.core.errors import UsageError
from rollmill.core.local_paths import local_path
from rollmill.core.options import Arg, Option, build, options_of
from rollmill.envs import check_name
from rollmill.runs.algorithms import ALGORITHMS, BUILTIN
from rollmill.runs.options import RunOptions
from rollmill.training.request import NETWORK, TrainingRequest, default_config, find_own_algorithm, find_recipe

Field: TypeAlias = tuple[str, Any, Any]
"""Name, type and default of a dataclass field."""
MERGED = Arg(name="")


class ParsedTraining(NamedTuple):
    """The parsed arguments of a command that trains."""

    request: TrainingRequest
    searching: SearchOptions
    given: Mapping[str, Any]
    """Values of all options that the user gave, by name, including those from a file given by `--config`."""
    more: Any = None
    """Value of the command's additional field."""


@dataclass(frozen=True)
class _Head:
    """The options that decide which other options there are."""

    config: str | None = None
    recipe: str | None = None
    imports: Imports = ()
    run: Annotated[RunOptions, MERGED] = RunOptions()


def parse_training(
    arguments: Sequence[str], *, command: str = "train", more: Field | None = None
) -> ParsedTraining:
    """Parses the arguments of a command that trains: the algorithm, the environment and the options.

    `more` is an additional field of the command's options. Raises a `UsageError` if an argument or the file given
    by `--config` is invalid, or if neither names an algorithm and an environment.
    """
    named = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if len(named) == 2 and named[1] in BUILTIN and not ALGORITHMS.has(named[0]):
        raise UsageError(
            f"the algorithm comes before the environment: rollmill {command} {named[1]} {named[0]} [OPTIONS]"
        )
    head, file = _head(arguments[len(named) :], names_environment=len(named) > 1)
    lacking = file.lacking(named) if file else ()
    named += [file.name(name) for name in lacking] if file else []
    if not named:
        raise UsageError(
            f"the algorithm must come before {arguments[0]}. Usage: rollmill {command} ALGORITHM ENVIRONMENT "
            "[OPTIONS]"
        )
    algorithm, *words = [*named, *arguments[len(named) - len(lacking) :]]
    prog = f"rollmill {command} {algorithm}"
    with named_in(file if "algorithm" in lacking else None):
        find_own_algorithm(
            algorithm,
            None if HELP & set(words) else head.run,
            head.imports,
            environment=_environment_in(words),
        )
        kind = _kind(algorithm, head.recipe, more)
    if "environment" in lacking and not head.imports:
        with named_in(file):
            check_name(named[1])
    options = options_of(kind)
    under = file.values(options) if file else {}
    parsed, given = parse_given(
        kind, words, prog=prog, under=under, merge=merge_environment_options, algorithms_with=_algorithms_with
    )
    parsed.searching.check(set(given))
    request = request_of(algorithm, parsed, given, options)
    _note_recipe(request)
    return ParsedTraining(request, parsed.searching, given, None if more is None else getattr(parsed, more[0]))


def training_options(algorithm: str) -> list[Option]:
    """Returns the options of `rollmill train` for an algorithm."""
    return options_of(_kind(algorithm, None, None))


def _algorithms_with(option: str) -> list[str]:
    """Returns the built-in algorithms whose hyperparameters include an option."""
    return [
        name
        for name, algorithm in BUILTIN.items()
        if option in {each.name for each in options_of(algorithm.config)}
    ]


def _head(words: Sequence[str], *, names_environment: bool) -> tuple[_Head, ConfigFile | None]:
    """Returns the options that come first, from the words and the file that they name."""
    head, given = parse_known(_Head, words, prog="rollmill train")
    if head.config is None:
        return head, None
    file = read_config_file(local_path("config", head.config))
    file.check_code(given, with_environment=not names_environment)
    if file.is_of_run and head.recipe is not None:
        raise UsageError(
            f"--recipe {head.recipe} has no effect, because {file.path} sets all hyperparameters. hint: leave one "
            "of them out."
        )
    options = options_of(_Head)
    return build(_Head, options, {**file.values(options, strict=False), **given}), file


def _environment_in(words: Sequence[str]) -> str:
    """Returns the id of the environment, which may follow options of an algorithm not yet imported."""
    if words and not words[0].startswith("-"):
        return words[0]
    follows = {after for before, after in pairwise(words) if before.startswith("--") and "=" not in before}
    return next((word for word in words if not word.startswith("-") and word not in follows), "")


def request_of(
    algorithm: str, parsed: Any, given: Mapping[str, Any], options: Sequence[Option]
) -> TrainingRequest:
    """Returns the training request for parsed options, which have fields such as `environment`, `env_options` and
    `imports`.

    `given` has the values that the user set, by name, and `options` lists all options of the command.
    """
    paths = {option.name: option.path for option in options}
    settings = {
        ".".join(path[1:]): str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if (path := paths[name])[0] in ("hyperparameters", "run")
    }
    network = {} if parsed.network_name is None else {NETWORK: parsed.network_name}
    return TrainingRequest(
        algorithm=algorithm,
        environment=parsed.environment,
        settings={**settings, **network},
        environment_options=chosen_environment_options(parsed.env_options, parsed.transforms),
        imports=parsed.imports,
        recipe=getattr(parsed, "recipe", None),
    )


def _kind(algorithm: str, recipe: str | None, more: Field | None) -> type:
    """Returns the dataclass of the command's options, with a recipe's hyperparameters as defaults."""
    config = default_config(algorithm, recipe)
    return make_dataclass(
        "Train",
        [
            ("environment", Annotated[str, _ENVIRONMENT]),
            ("env_options", EnvOptions, ()),
            ("transforms", Transforms, ()),
            ("network_name", NetworkName, None),
            ("config", Annotated[str | None, Arg(help=_CONFIG, metavar="FILE")], None),
            ("recipe", Annotated[str | None, Arg(help=_RECIPE, metavar="NAME")], None),
            ("imports", Imports, ()),
            *([more] if more else []),
            ("searching", Annotated[SearchOptions, MERGED], SearchOptions()),
            ("hyperparameters", Annotated[type(config), MERGED], config),
            ("run", Annotated[RunOptions, MERGED], RunOptions()),
        ],
        frozen=True,
    )


_ENVIRONMENT = Arg(
    metavar="ENVIRONMENT", help="Id of the environment; `rollmill list` shows them.", positional=True
)
_CONFIG = (
    "Reads options from a TOML file or from a run's config.json. Options on the command line take precedence."
)
_RECIPE = "Starts from the hyperparameters and environment options of a recipe. `rollmill list` shows the recipes."


def _note_recipe(request: TrainingRequest) -> None:
    """Says so where a recipe was made for another environment."""
    if request.recipe is None:
        return
    recipe = find_recipe(request.recipe)
    if recipe.environment != request.environment:
        print(
            f"note: the recipe {request.recipe} was tuned for {recipe.environment}, not for {request.environment}",
            file=sys.stderr,
        )
