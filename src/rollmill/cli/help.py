"""Formats the output of `--help` and `--help-all`: the options of a command, with descriptions and defaults."""

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from shutil import get_terminal_size
from typing import Any

from rollmill.core.options import Option, metavar_of

RECORDING = {
    "run-dir",
    "log-every",
    "checkpoint-seconds",
    "checkpoint-iterations",
    "keep-last",
    "keep-best",
    "tensorboard",
    "track",
    "dashboard",
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
COMMON = (
    *("total-timesteps", "num-envs", "learning-rate", "recipe", "seed", "num-seeds", "run-dir"),
    *("evaluate-every", "distribution", "fusion"),
)
"""Options of `rollmill train` that `--help` describes, in this order. `--help-all` describes all."""
MAX_WIDTH = 110


def help_text(options: Sequence[Option], *, prog: str, description: str = "", everything: bool = True) -> str:
    """Returns the help text of the command `prog`.

    For a command that trains, it describes the common options and the command's own, and only lists the names of
    all others, unless `everything` is set.
    """
    if not any(option.path[0] == "hyperparameters" for option in options):
        return format_options({"options": options}, prog=prog, description=description)
    groups: dict[str, list[Option]] = {name: [] for name in GROUPS}
    for option in options:
        groups[_group(option)].append(option)
    if everything:
        return format_options(groups, prog=prog, description=description)
    by_name = {option.name: option for option in options}
    own = [option for option in groups["options"] if option.path[0] != "searching"]
    positional = [option for option in options if option.arg.positional]
    first = {
        "common options": [*positional, *(by_name[name] for name in COMMON if name in by_name)],
        f"options of {prog.rpartition(' ')[0]}": own,
    }
    shown = [*first["common options"], *own]
    rest = {name: [f"--{one.name}" for one in group if one not in shown] for name, group in groups.items()}
    rows = [(name, " ".join(names)) for name, names in rest.items() if names]
    return "\n".join(
        [
            format_options(first, prog=prog, description=description),
            "",
            f"more options, described by `{prog} --help-all`:",
            *two_columns(rows),
            "",
            "`rollmill help WORD` searches the options of all commands.",
        ]
    )


def format_options(
    groups: Mapping[str, Sequence[Option]], *, prog: str, description: str = "", usage: str = ""
) -> str:
    """Returns a help text with the descriptions of options by group, wrapped to the width of the terminal."""
    of_all = [option for group in groups.values() for option in group]
    shown = [option.shown for option in of_all if option.arg.positional]
    parser = argparse.ArgumentParser(
        usage=usage or " ".join([prog, *shown, "[OPTIONS]"]),
        description=description.replace("%", "%%"),
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30, width=width()),
    )
    for name, members in groups.items():
        group = parser.add_argument_group(name)
        for option in members:
            _add(group, option)
    return parser.format_help().rstrip()


def width() -> int:
    """Returns the width of a help text in columns: the width of the terminal, up to a limit."""
    return min(get_terminal_size().columns, MAX_WIDTH)


def two_columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Formats names and descriptions in two columns, with the descriptions wrapped."""
    rows = list(rows)
    indent = min(max((len(name) for name, _ in rows), default=0), 28) + 4
    return [line for name, text in rows for line in _wrap_row(name, text, indent)]


def _wrap_row(name: str, text: str, indent: int) -> list[str]:
    beside = len(name) + 4 <= indent
    wrapped = textwrap.wrap(
        text,
        max(width(), indent + 20),
        initial_indent=f"  {name}".ljust(indent) if beside else " " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = wrapped or [f"  {name}"]
    return lines if beside else [f"  {name}", *lines]


def meaning_of(option: Option) -> str:
    """Returns the description of an option, with its default."""
    return " ".join([*option.help.split(), *_default(option)])


def _add(group: Any, option: Option) -> None:
    meaning = meaning_of(option).replace("%", "%%")
    if option.arg.positional:
        group.add_argument(option.name, metavar=option.shown, help=meaning)
        return
    names = [f"--{name}" for name in (option.name, option.negated) if name]
    if option.is_flag:
        group.add_argument(*names, action="store_true", help=meaning)
    else:
        group.add_argument(*names, metavar=metavar_of(option), help=meaning)


def _default(option: Option) -> list[str]:
    if option.arg.repeated:
        return ["(repeatable)"]
    if option.is_required or option.arg.positional or option.arg.only_on:
        return []
    said = ("left out", "Default: ", "By default,")
    # the description says what happens without the option
    if option.default is None and any(words in option.help for words in said):
        return []
    return [f"(default: {_text(option.default)})"]


def _text(value: Any) -> str:
    if value is None or value in ((), []):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(map(_text, value))
    return str(value)


def _group(option: Option) -> str:
    """Returns the group of an option by its path of fields."""
    holder, field = option.path[0], option.path[-1]
    if holder in ("environment", "env_options", "transforms", "imports"):
        return "environment"
    if "network" in option.path[:-1] or holder == "network_name":
        return "network"
    if holder in ("hyperparameters", "algorithm", "recipe"):
        return "algorithm"
    if holder not in ("run", "config"):
        return "options"
    return next((group for group, names in _RUN_OPTIONS.items() if field.replace("_", "-") in names), "placement")


_RUN_OPTIONS = {"run": RUN, "evaluation": EVALUATION, "recording": RECORDING, "fusion": FUSION}
