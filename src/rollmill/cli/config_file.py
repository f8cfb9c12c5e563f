"""The option `--config FILE`: options of a training from a file, as if they had been given on the command line.

The file is TOML, whose keys are names of options, or the config.json of a run. Options on the command line come
before those of the file.
"""

import contextlib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rollmill.api import RunOptions
from rollmill.cli.parsing import OptionType, given_options, options_like, values_of
from rollmill.core.bounds import check_numbers
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.fields import fit
from rollmill.core.folder import read_named
from rollmill.core.json_data import parse_object
from rollmill.core.local_paths import local_path
from rollmill.envs import check_name

OPTION = "--config"
MAX_BYTES = 2**20
POSITIONAL = ("algorithm", "environment")
REPEATED = ("env-option", "transform", "import")
"""Options that are given once for each value."""
MISNAMED = {
    **dict.fromkeys(("environment-options", "environment-option", "env-options", "env-kwargs"), "env-option"),
    **{"imports": "import", "modules": "import", "transforms": "transform"},
}
"""Names that runs and programs have for options which are given once for each value."""

TypesOf: TypeAlias = Callable[[str, list[str]], Mapping[str, OptionType]]
"""The types of a training's options, by the algorithm and all arguments after it."""


def with_config_file(arguments: Sequence[str], types_of: TypesOf) -> list[str]:
    """The arguments of a training with those of the file of `--config` in its place.

    Args:
        arguments: the algorithm, the environment and options.
        types_of: gives the types of a training's options, by their names.

    Raises:
        UsageError: the file cannot be read, names no algorithm or environment where the arguments do not, has an
            option that does not exist or a value that is not one of it; or the arguments name a third thing.
    """
    files, (named, options) = values_of(OPTION, arguments), _split(_without_option(arguments))
    if not files:
        return list(arguments)
    path = local_path("config", files[-1])
    settings = _read(path)
    lacking = POSITIONAL[len(named) :]
    for name in lacking:
        if not isinstance(settings.get(name), str):
            raise UsageError(
                f"neither the command nor {path} names the {name}. hint: {name} = ... at the top of the file."
            )
        named.append(settings[name])
    given = given_options(options)
    of_file = [option for option in _options(settings) if option.name not in given]
    rest = [*named[1:], *_words(of_file, path), *options]
    with _read_from(path if lacking == POSITIONAL else None):
        types = types_of(named[0], rest)
    with _read_from(path if "environment" in lacking else None):
        check_name(named[1])
    return [*named, *_words([_checked(option, types, path) for option in of_file], path), *options]


def words_of_file(file: str) -> list[str]:
    """All that a file of `--config` names, as words of a training; nothing is imported, and no value is checked.

    Raises:
        UsageError: the file cannot be read, or holds what is no value of an option.
    """
    path = Path(file)
    settings = _read(path)
    named = [text for name in POSITIONAL if isinstance(text := settings.get(name), str)]
    return [*named, *_words(_options(settings), path)]


@contextlib.contextmanager
def _read_from(path: Path | None) -> Iterator[None]:
    """Puts the file that a wrong name comes from in front of the error."""
    try:
        yield
    except UsageError as error:
        raise error if path is None else UsageError(f"{path}: {error}") from error


class _Option(NamedTuple):
    """An option that a file gives."""

    key: str
    """As the file has it, with those of its tables in front."""
    value: Any

    @property
    def name(self) -> str:
        """The option's name, without dashes in front."""
        return self.key.replace("_", "-")


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The algorithm and the environment, as far as they are named, and the options.

    Raises:
        UsageError: more is named.
    """
    named = list(takewhile(lambda word: not word.startswith("-"), words))
    if len(named) > len(POSITIONAL):
        raise UsageError(
            f"{named[2]!r} is one name too many: a training takes an algorithm, here {named[0]!r}, an "
            f"environment, here {named[1]!r}, and options, which begin with --."
        )
    return named, list(words[len(named) :])


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
        text = read_named(path, limit=MAX_BYTES).decode()
    except (OSError, CheckpointError, UnicodeDecodeError) as error:
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


def _options(settings: Mapping[str, Any], prefix: str = "") -> Iterator[_Option]:
    """The options of a file; those of a table have its name in front."""
    for key, value in settings.items():
        option = _Option(f"{prefix}{key}", value)
        if isinstance(value, Mapping) and option.name not in (*REPEATED, *MISNAMED):
            yield from _options(value, prefix=f"{option.key}.")
        elif option.name not in POSITIONAL:
            yield option


def _checked(option: _Option, types: Mapping[str, OptionType], path: Path) -> _Option:
    """The option with its value as the option's type has it.

    Raises:
        UsageError: there is no such option, or the value is not one of it.
    """
    if option.name not in types:
        raise UsageError(f"{path}: unknown option {option.key}. {_suggestion(option, types)}")
    if option.name in REPEATED or option.value is None or path.suffix == ".json":
        return option
    try:
        return option._replace(value=_fitted(option, types[option.name]))
    except UsageError as error:
        raise UsageError(f"{path}: {error}{_hint(option, types[option.name])}") from None


def _suggestion(option: _Option, types: Mapping[str, OptionType]) -> str:
    if option.name in MISNAMED:
        meant = MISNAMED[option.name]
        return f"Did you mean {meant}{' (a table)' if isinstance(option.value, Mapping) else ''}?"
    near = options_like(option.name, types)
    tables = {name.rpartition(".")[0] for name in types} - {""}
    if not near and (table := options_like(option.name.partition(".")[0], tables)):
        return f"Did you mean the table {table[0]}?"
    return f"Did you mean {' or '.join(near)}?" if near else "`rollmill train ALGORITHM --help` lists the options."


def _fitted(option: _Option, kind: OptionType) -> Any:
    """The value as the option's type has it.

    Raises:
        UsageError: it is of another type, or out of bounds.
    """
    value = fit(option.key, kind.hint, option.value)
    if kind.bounds is not None:
        check_numbers(option.key, value, kind.bounds)
    return value


def _hint(option: _Option, kind: OptionType) -> str:
    """Where a number or a truth value is given as text: to leave out the quotes."""
    if not isinstance(option.value, str):
        return ""
    try:
        read = tomllib.loads(f"value = {option.value}")["value"]
        _fitted(option._replace(value=read), kind)
    except (tomllib.TOMLDecodeError, UsageError):
        return ""
    return f" hint: leave out the quotes: {option.key.rpartition('.')[2]} = {option.value}"


def _words(options: Iterable[_Option], path: Path) -> list[str]:
    """The words that give options on the command line."""
    return [word for option in options for word in _words_of(option, path)]


def _words_of(option: _Option, path: Path) -> list[str]:
    name, value = option.name, option.value
    if name in REPEATED:
        return [word for text in _texts(value) for word in (f"--{name}", text)]
    if isinstance(value, bool):
        return [f"--{name}" if value else _negated(name)]
    if isinstance(value, list | tuple) and value:
        return [f"--{name}", *map(str, _flat(value))]
    if isinstance(value, int | float | str | Path):
        return [f"--{name}", str(value)]
    if value is None or isinstance(value, Mapping) or value in ([], ()):
        return []
    raise UsageError(f"{path}: {option.key} = {value} is no value of an option.")


def _negated(name: str) -> str:
    section, dot, last = name.rpartition(".")
    return f"--{section}{dot}no-{last}"


def _texts(value: Any) -> list[str]:
    """The values of an option that is given once for each of them."""
    if isinstance(value, Mapping):
        return [f"{key}={part if isinstance(part, str) else json.dumps(part)}" for key, part in value.items()]
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list | tuple) else [value]
