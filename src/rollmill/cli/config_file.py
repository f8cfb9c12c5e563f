"""The option `--config FILE`: options of a training from a file, as if they had been given on the command line.

The file is TOML, whose keys are names of options, or the config.json of a run. Options on the command line come
before those of the file.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollmill.api import RunOptions
from rollmill.cli.parsing import given_options, values_of
from rollmill.core.errors import UsageError
from rollmill.core.json_data import parse_object

OPTION = "--config"
POSITIONAL = ("algorithm", "environment")
REPEATED = ("env-option", "transform", "import")
"""Options that are given once for each value."""


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """The arguments of a training with those of the file of `--config` in its place.

    Raises:
        UsageError: the file cannot be read, or names no algorithm or environment where the arguments do not.
    """
    files = values_of(OPTION, arguments)
    if not files:
        return list(arguments)
    path, words = Path(files[-1]), _without_option(arguments)
    settings = {name.replace("_", "-"): value for name, value in _read(path).items()}
    named = list(takewhile(lambda word: not word.startswith("-"), words))[: len(POSITIONAL)]
    for name in POSITIONAL[len(named) :]:
        if not isinstance(settings.get(name), str):
            raise UsageError(
                f"neither the command nor {path} names the {name}. hint: {name} = ... at the top of the file."
            )
        named.append(settings[name])
    given = given_options(words)
    options = {name: value for name, value in settings.items() if name not in POSITIONAL}
    of_file = [word for name, words in _options(options, path) if name not in given for word in words]
    return [*named, *of_file, *words[len(list(takewhile(lambda word: not word.startswith("-"), words))) :]]


def _without_option(arguments: Sequence[str]) -> list[str]:
    kept, words = [], iter(arguments)
    for word in words:
        if word == OPTION:
            next(words, None)
        elif not word.startswith(f"{OPTION}="):
            kept.append(word)
    return kept


def _read(path: Path) -> dict[str, Any]:
    """The content of a file, its names those of options.

    Raises:
        UsageError: there is none, or it is neither TOML nor the config.json of a run.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{OPTION} {path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        content = parse_object(text, where=str(path), error=UsageError)
        if not isinstance(content.get("graph"), dict) or not isinstance(content.get("options"), dict):
            raise UsageError(f"{path} is not the config.json of a run. hint: other files are TOML, NAME.toml.")
        return _of_run(content)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}.") from error


def _of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that differ from the defaults."""
    graph, options, default = config["graph"], config["options"], RunOptions()
    return {
        **{name: graph.get(name) for name in POSITIONAL},
        **graph.get("config", {}),
        **{name: value for name, value in options.items() if value != _plain(getattr(default, name, None))},
        "env-option": graph.get("environment_options", {}),
        "import": config.get("imports", []),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _options(settings: Mapping[str, Any], path: Path, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Names of options, and the words that give them."""
    for key, value in settings.items():
        name = f"{prefix}{key.replace('_', '-')}"
        if name in REPEATED:
            yield name, [word for text in _texts(value) for word in (f"--{name}", text)]
        elif isinstance(value, Mapping):
            yield from _options(value, path, prefix=f"{name}.")
        elif isinstance(value, bool):
            yield name, [f"--{name}" if value else _negated(name)]
        elif isinstance(value, list) and value:
            yield name, [f"--{name}", *map(str, _flat(value))]
        elif isinstance(value, int | float | str):
            yield name, [f"--{name}", str(value)]
        elif value is not None and value != []:
            raise UsageError(f"{path}: {name} = {value} is no value of an option.")


def _negated(name: str) -> str:
    section, dot, last = name.rpartition(".")
    return f"--{section}{dot}no-{last}"


def _texts(value: Any) -> list[str]:
    """The values of an option that is given once for each of them."""
    if isinstance(value, Mapping):
        return [f"{key}={part if isinstance(part, str) else json.dumps(part)}" for key, part in value.items()]
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]
