"""Command-line options: parsed by tyro, listed in groups by `--help`, with suggestions for unknown ones."""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import io
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from shutil import get_terminal_size
from typing import Any, NamedTuple, NoReturn, get_type_hints

import tyro

from rollmill.cli.values import Option, check_values
from rollmill.core.bounds import Range, bounds_of
from rollmill.core.errors import UsageError
from rollmill.core.fields import named_like, note_on
from rollmill.core.local_paths import check_local_paths

RECORDING = {
    "run-dir",
    "log-every",
    "checkpoint-seconds",
    "checkpoint-iterations",
    "keep-last",
    "keep-best",
    "tensorboard",
    "quiet",
}
FUSION = {"fusion", "numerics", "unroll"}
RUN = {"config", "start-from", "seed", "num-seeds", "stop-at-return"}
EVALUATION = {
    "evaluate-every",
    "evaluate-episodes",
    "evaluate-seed",
    "evaluate-stochastic",
    "evaluate-env-options",
}
GROUPS = (
    *("environment", "algorithm", "network", "run", "evaluation", "recording", "placement", "fusion"),
    "options",
)
"""Groups of options, in the order of `--help`."""


ANSI = re.compile(r"\x1b\[[0-9;]*m")
SIDES, RULES = " │|", " ─-╭╮╰╯+"
"""Characters at the sides of a box, and those of its lines without text."""


class RefusingParser(argparse.ArgumentParser):
    """Parses the few options of a command whose help is written by hand; raises a `UsageError` for wrong ones.

    Args:
        command: such as `rollmill gpu`.
    """

    def __init__(self, command: str) -> None:
        argparse.ArgumentParser.__init__(self, add_help=False, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        """Raises the error, instead of printing it and exiting."""
        raise UsageError(f"{message}. `{self._command} --help` lists the options.")


def parse(kind: Any, arguments: Sequence[str], *, prog: str) -> Any:
    """Parses the options of a command to an instance of `kind`; `--help` lists them and exits.

    Raises:
        UsageError: an option is unknown; suggests the nearest ones, or the one for another library's name. Or an
            argument is missing or one too many, or an option does not take a value.
        SystemExit: after help.
    """
    parser = _parser(kind, prog)
    known = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    for word in arguments:
        option = word.partition("=")[0]
        if len(option) > 2 and option.startswith("--") and option[2:].replace("_", "-") not in known:
            if (note := note_on(option, known)) is not None:
                raise UsageError(f"unknown option {option}. --{note}")
            near = [f"--{name}" for name in options_like(option[2:], known)]
            suggestion = f"Did you mean {' or '.join(near)}?" if near else f"`{prog} --help` lists the options."
            raise UsageError(f"unknown option {option}. {suggestion}")
    if any(word in ("-h", "--help") for word in arguments):
        print(_help(parser, prog, kind))
        raise SystemExit(0)
    words, given = check_values(arguments, _options(kind, parser))
    _check_positional(given, [action for action in parser._actions if not action.option_strings], prog)
    with _errors_in_a_sentence(prog):
        options = tyro.cli(kind, prog=prog, args=words)
    check_local_paths(options)
    return options


def parse_known(kind: Any, arguments: Sequence[str], *, prog: str) -> Any:
    """Parses those of the arguments that are options of `kind`, and leaves all others.

    Raises:
        UsageError: one of them does not take a value.
    """
    words, _ = check_values(arguments, _options(kind, _parser(kind, prog)))
    with _errors_in_a_sentence(prog):
        return tyro.cli(kind, prog=prog, args=words, return_unknown_args=True, add_help=False)[0]


def positional_words(kind: Any, arguments: Sequence[str], *, prog: str) -> list[str]:
    """The arguments that are no option of `kind`, and no value of one.

    Raises:
        UsageError: an option does not take its value.
    """
    return check_values(arguments, _options(kind, _parser(kind, prog))).positional


def _options(kind: Any, parser: Any) -> dict[str, Option]:
    """The options of a command that take values."""
    hints = {f"--{name}": found.hint for name, found in option_types(kind).items()}
    return {
        name: Option(hints.get(name, Any), None if action.nargs in ("*", "+") else action.nargs or 1)
        for action in parser._actions
        for name in action.option_strings
        if action.nargs != 0
    }


def _check_positional(given: Sequence[str], positional: Sequence[Any], prog: str) -> None:
    if any(action.nargs in ("*", "+") for action in positional):
        return
    if missing := [str(action.metavar) for action in positional[len(given) :] if action.required]:
        raise UsageError(f"{prog} needs {' and '.join(missing)}. `{prog} --help` describes it.")
    if more := given[len(positional) :]:
        raise UsageError(f"{prog} has no use for {more[0]!r}. hint: options begin with --.")


@contextlib.contextmanager
def _errors_in_a_sentence(prog: str) -> Iterator[None]:
    """Turns the box that tyro prints for arguments that it cannot parse into an error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UsageError(f"{_text_of(printed.getvalue())}. `{prog} --help` lists the options.") from ended
    sys.stderr.write(printed.getvalue())  # warnings, of an option's type perhaps


def _text_of(box: str) -> str:
    """The text in a box, without the box, its title and its hint at --help."""
    _, *lines = ANSI.sub("", box).splitlines() or [""]
    texts = (text for line in lines if (text := line.strip(SIDES)).strip(RULES))
    return " ".join(texts).partition("For full helptext")[0].strip() or "the arguments cannot be parsed"


def options_like(name: str, known: Iterable[str]) -> list[str]:
    """The known options, without dashes in front, that may be meant by an unknown one; the nearest first."""
    names = {option for option in known if not option.rpartition(".")[2].startswith("no-")}
    meant = named_like(name, {option.replace("-", "_") for option in names})
    if meant is not None:
        return [meant.replace("_", "-")]
    plain = name.replace("_", "-").lower()
    ending = sorted(option for option in names if option.rpartition(".")[2] == plain)
    return ending or difflib.get_close_matches(plain, sorted(names), n=1, cutoff=0.6)


class OptionType(NamedTuple):
    """The type of an option's value, and the bounds of its numbers."""

    hint: Any
    bounds: Range | None


def option_types(kind: type, prefix: str = "") -> dict[str, OptionType]:
    """The type of each option of a command, by its name without dashes in front.

    Args:
        kind: a dataclass as for `parse`; options of those that it holds are included.
        prefix: put before each name.
    """
    annotated, types = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    found, bounds = {}, bounds_of(kind)
    for field in dataclasses.fields(kind):
        name, hint = _option_name(field.name, annotated[field.name]), types[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= option_types(hint, f"{prefix}{name}." if name else prefix)
        else:
            found[prefix + name] = OptionType(hint, bounds.get(field.name))
    return found


def _option_name(field: str, hint: Any) -> str:
    """The name of a field's option, as tyro has it."""
    given = [part.name for part in getattr(hint, "__metadata__", ()) if getattr(part, "name", None) is not None]
    return given[-1] if given else field.replace("_", "-")


def flags_and_lists(kind: Any, *, prog: str) -> tuple[set[str], set[str]]:
    """Names of the options of `kind` that are on or off, and of those that any number of words follow."""
    flags, lists = set(), set()
    for action in _parser(kind, prog)._actions:
        names = {option.removeprefix("--") for option in action.option_strings}
        if action.nargs == 0:
            flags |= {name for name in names if not name.rpartition(".")[2].startswith("no-")}
        elif action.nargs == "*":
            lists |= names
    return flags, lists


def values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """All values given for one option, parsed before the other options are known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, dest="values", nargs="?", action="append", default=[])
    return [value for value in parser.parse_known_args(list(arguments))[0].values if value is not None]


def given_options(arguments: Sequence[str]) -> set[str]:
    """Names of the options that are given, without dashes in front, and without the `no-` of a flag."""
    options = (word.partition("=")[0][2:].replace("_", "-") for word in arguments if word.startswith("--"))
    return {option.removeprefix("no-") for option in options}


def _parser(kind: Any, prog: str) -> Any:
    """Tyro's parser, whose actions argparse's help formatter can list."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return tyro.extras.get_parser(kind, prog=prog)


def _help(parser: Any, prog: str, kind: Any) -> str:
    """The help text: options in groups, in plain text."""
    formatter = argparse.HelpFormatter(prog, max_help_position=30, width=min(get_terminal_size().columns, 110))
    positional = " ".join(str(a.metavar) for a in parser._actions if not a.option_strings)
    formatter.add_usage(f"%(prog)s {positional} [OPTIONS]", [], [])
    if kind.__module__ != "types" and parser.description:
        formatter.add_text(parser.description.replace("%", "%%"))
    by_group: dict[str, list[Any]] = {name: [] for name in GROUPS}
    has_algorithm = any(action.dest.startswith("hyperparameters.") for action in parser._actions)
    for action in parser._actions:
        by_group[_group(action) if has_algorithm else "options"].append(_plain(action))
    for name, actions in by_group.items():
        if actions:
            formatter.start_section(name)
            formatter.add_arguments(actions)
            formatter.end_section()
    return formatter.format_help().rstrip()


def _group(action: Any) -> str:
    """The group of an option, by the path of its field in the command's dataclass."""
    holder, _, name = action.dest.rpartition(".")
    if action.dest in ("environment", "env-options", "transforms", "imports"):
        return "environment"
    if "network" in holder or action.dest == "network-name":
        return "network"
    if holder == "hyperparameters" or action.dest in ("algorithm", "recipe"):
        return "algorithm"
    if holder != "run" and name not in RUN:
        return "options"
    return next((group for group, names in _OF_RUNS.items() if name in names), "placement")


_OF_RUNS = {"run": RUN, "evaluation": EVALUATION, "recording": RECORDING, "fusion": FUSION}


def _plain(action: Any) -> Any:
    """The option for argparse's help, without tyro's marks for optional values."""
    shown = copy.copy(action)
    if isinstance(shown.metavar, str):
        shown.metavar = shown.metavar.replace("{None}|", "")
    text = " ".join((shown.help or "").replace(" (required)", "").split())
    shown.help = text.replace("(default: None)", "(default: none)").replace("%", "%%")
    return shown
