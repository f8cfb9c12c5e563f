"""The option `--config FILE`, which reads options of a run from a file.

The file is TOML with names of options as keys, or the config.json of a run. Options on the command line take
precedence.
"""

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.cli.argument_values import options_like
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.folder import read_named
from rollmill.core.json_data import check_limits, parse_object, short_json
from rollmill.core.options import Option
from rollmill.core.schema import read_as
from rollmill.envs.options import option_text
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.earlier_versions import with_added
from rollmill.runs.options import RunOptions
from rollmill.runs.trust import CLUSTER, START, find_recorded, trusted_modules
from rollmill.training.request import TrainingRequest, named_by

OPTION = "--config"
MAX_BYTES = 2**20
POSITIONAL = ("algorithm", "environment")
CONFIG = "config.json"
CONFIG_KEY = OPTION.removeprefix("--")
REPEATED = ("env-option", "transform", "import")
"""Options that are given once for each value."""
MISNAMED = {
    **dict.fromkeys(("environment-options", "environment-option", "env-options", "env-kwargs"), "env-option"),
    **{"imports": "import", "modules": "import", "transforms": "transform"},
}
"""Names of repeated options in configurations and Python code, with the names of the options."""


class _FileEntry(NamedTuple):
    """A value of a file."""

    key: str
    """Key in the file, after the names of its tables."""
    value: Any

    @property
    def name(self) -> str:
        """Name of the option, without leading dashes."""
        return self.key.replace("_", "-")


@dataclass(frozen=True)
class ConfigFile:
    """Content of a file given by `--config`."""

    path: Path
    content: Mapping[str, Any]
    is_of_run: bool = False
    """Whether the file is the config.json of a run, which somebody else may have written."""
    import_files: Mapping[str, str] = field(default_factory=dict)
    """Files of the modules that the run imported and that are not installed."""

    def check_code(self, given: Mapping[str, Any], *, with_environment: bool) -> None:
        """Raises a `UsageError` if a run's file names code that the user has neither allowed nor named.

        Modules that the user has allowed, and that Python does not find, are found in the files of the run.

        A module and a cluster count as code, and so does a store, which is opened with the user's credentials.
        `given` has the values of the command's own options, by name. `with_environment` says that the
        environment comes from the run.
        """
        if not self.is_of_run:
            return
        named = named_by([self._request(given, with_environment=with_environment)])
        trusted = trusted_modules(RunDirectory(self.path.parent)) if self.path.name == CONFIG else set()
        if modules := sorted(named.modules - trusted - {*given.get("import", ())}):
            options = " ".join(f"--import {module}" for module in modules)
            raise UsageError(
                f"{self.path} was created elsewhere and names modules that would be imported: "
                f"{', '.join(modules)}. hint: if you trust it, add {options}."
            )
        if stores := sorted(named.stores - trusted):
            url = stores[0].removeprefix(START)
            raise UsageError(
                f"{self.path} was created elsewhere and starts from weights at {url}, which would be read with "
                f"your credentials. hint: if you trust it, add --start-from {url}."
            )
        if clusters := sorted(named.clusters - trusted):
            address = clusters[0].removeprefix(CLUSTER)
            raise UsageError(
                f"{self.path} was created elsewhere and names the cluster {address}, through which others can "
                f"run code on this machine. hint: if you trust it, add --cluster {address}."
            )
        imports = tuple(given.get("import", ()))
        find_recorded(named.modules & trusted, self.import_files, where=self.path, user_imports=imports)

    def _request(self, given: Mapping[str, Any], *, with_environment: bool) -> TrainingRequest:
        """Returns the settings that name code, unless the command line sets them."""
        names = [name for name in ("distribution", "cluster", "start_from") if name not in given]
        return TrainingRequest(
            algorithm="",
            environment=str(self.content.get("environment")) if with_environment else "",
            settings={name: self.content.get(name) for name in names},
            imports=() if "import" in given else tuple(_texts(self.content["import"])),
        )

    def lacking(self, named: Sequence[str]) -> tuple[str, ...]:
        """Returns which of `algorithm` and `environment` the file must name, because the command does not.

        `named` has the command's arguments before its options: none, the algorithm, or algorithm and environment.
        Raises a `UsageError` if there are more.
        """
        if len(named) > len(POSITIONAL):
            raise UsageError(
                f"unexpected argument {named[2]!r}: expected one algorithm (got {named[0]!r}), one environment "
                f"(got {named[1]!r}) and options, which begin with --."
            )
        return POSITIONAL[len(named) :]

    def name(self, which: str) -> str:
        """Returns the algorithm or environment that the file names. Raises a `UsageError` if it names none."""
        if not isinstance(name := self.content.get(which), str):
            raise UsageError(
                f"neither {self.path} nor the command line names the {which}. hint: add {which} = ... at the "
                "top of the file."
            )
        return name

    def values(self, options: Sequence[Option], *, strict: bool = True) -> dict[str, Any]:
        """Returns the file's values of options, by name. With `strict`, every entry must be a known option.

        Raises a `UsageError` if the file has an unknown option, or a value that its option rejects.
        """
        known = {option.name: option for option in options}
        entries = [entry for entry in _entries(self.content) if strict or entry.name in known]
        keys: dict[str, str] = {}
        for entry in entries:
            if entry.name not in known:
                raise UsageError(f"{self.path}: unknown option {entry.key}. {_suggestion(entry, known)}")
            if (other := keys.setdefault(entry.name, entry.key)) != entry.key:
                raise UsageError(
                    f"{self.path}: {other} and {entry.key} are the same option. hint: leave one of them out."
                )
        if strict and CONFIG_KEY in keys:
            raise UsageError(
                f"{self.path}: {CONFIG_KEY} cannot name another file, because a run reads one file of options. "
                "hint: copy the options of the other file into this file."
            )
        given = {entry.name: self._value(entry, known[entry.name]) for entry in entries}
        return {name: value for name, value in given.items() if value is not None or _may_be_none(known[name])}

    def _value(self, entry: _FileEntry, option: Option) -> Any:
        if entry.value is None:
            return None
        if entry.name in REPEATED:
            return tuple(map(self._conversion(option), _texts(entry.value)))
        try:
            return option.coerce(entry.value, name=entry.key)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}{_hint(entry, option)}") from None

    def _conversion(self, option: Option) -> Callable[[str], str]:
        """Returns the conversion of one text. The file of a run has names of modules, but no paths."""
        return str if self.is_of_run or option.arg.convert is None else option.arg.convert


def read_config_file(path: Path) -> ConfigFile:
    """Reads a file given by `--config`.

    Raises a `UsageError` if it does not exist, or is neither TOML nor a run's config.json.
    """
    try:
        text = read_named(path, limit=MAX_BYTES).decode()
    except (OSError, CheckpointError, UnicodeDecodeError) as error:
        raise UsageError(f"{OPTION} {path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        content = parse_object(text, where=str(path), error=UsageError)
        if not isinstance(content.get("graph"), dict) or not isinstance(content.get("options"), dict):
            raise UsageError(
                f"{path} is not a run's config.json. hint: any other configuration file must be TOML, with a "
                "name that ends in .toml."
            )
        files = read_as(dict[str, str], content.get("import_files", {}), where=str(path), field="import_files")
        return ConfigFile(path, _of_run(content, where=str(path)), is_of_run=True, import_files=files)
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path} cannot be read: it is nested too deeply.") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    check_limits(content, where=str(path), error=UsageError)
    return ConfigFile(path, content)


@contextlib.contextmanager
def named_in(file: ConfigFile | None) -> Iterator[None]:
    """Context manager that prefixes errors about a wrong name with the file that contains it."""
    try:
        yield
    except UsageError as error:
        raise error if file is None else UsageError(f"{file.path}: {error}") from error


def _of_run(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns the options of a run that differ from the defaults."""
    graph, options, default = config["graph"], config["options"], RunOptions()
    if not isinstance(settings := graph.get("config", {}), dict):
        raise UsageError(f"{where}: graph.config={short_json(settings)} must be an object.")
    return {
        **{name: graph.get(name) for name in POSITIONAL},
        **with_added(graph.get("algorithm"), settings),
        **{name: value for name, value in options.items() if value != _as_list(getattr(default, name, None))},
        "env-option": graph.get("environment_options", {}),
        "import": config.get("imports", []),
    }


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _entries(content: Mapping[str, Any], prefix: str = "") -> Iterator[_FileEntry]:
    """Yields the entries of a file, prefixed with the table's name inside a table."""
    for key, value in content.items():
        entry = _FileEntry(f"{prefix}{key}", value)
        if isinstance(value, Mapping) and entry.name not in (*REPEATED, *MISNAMED):
            yield from _entries(value, prefix=f"{entry.key}.")
        elif entry.name not in POSITIONAL:
            yield entry


def _may_be_none(option: Option) -> bool:
    """Returns whether an option can be None, but has another default."""
    if option.default is None or option.name in REPEATED:
        return False
    try:
        return option.coerce(None) is None
    except UsageError:
        return False


def _suggestion(entry: _FileEntry, known: Mapping[str, Option]) -> str:
    if entry.name in MISNAMED:
        meant = MISNAMED[entry.name]
        return f"Did you mean {meant}{' (a table)' if isinstance(entry.value, Mapping) else ''}?"
    near = options_like(entry.name, known)
    tables = {name.rpartition(".")[0] for name in known} - {""}
    if not near and (table := options_like(entry.name.partition(".")[0], tables)):
        return f"Did you mean the table {table[0]}?"
    return f"Did you mean {' or '.join(near)}?" if near else "`rollmill train ALGORITHM --help` lists the options."


def _hint(entry: _FileEntry, option: Option) -> str:
    """Returns a hint to leave out the quotes around a number or a truth value."""
    if not isinstance(entry.value, str):
        return ""
    try:
        read = tomllib.loads(f"value = {entry.value}")["value"]
        option.coerce(read, name=entry.key)
    except (tomllib.TOMLDecodeError, UsageError):
        return ""
    return f" hint: remove the quotes: {entry.key.rpartition('.')[2]} = {entry.value}"


def _texts(value: Any) -> list[str]:
    """Returns the values of a repeatable option."""
    if isinstance(value, Mapping):
        return [option_text(key, part) for key, part in value.items()]
    return [str(part) for part in (value if isinstance(value, list) else [value])]
