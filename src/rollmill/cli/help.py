"""The text of `--help`: a command's options in groups, with their meanings and defaults."""

import argparse
from collections.abc import Sequence
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
MAX_WIDTH = 110


def help_text(options: Sequence[Option], *, prog: str, description: str = "") -> str:
    """Returns the help text of the command `prog`."""
    width = min(get_terminal_size().columns, MAX_WIDTH)
    parser = argparse.ArgumentParser(
        usage=" ".join([prog, *(option.shown for option in options if option.arg.positional), "[OPTIONS]"]),
        description=description.replace("%", "%%"),
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30, width=width),
    )
    trains = any(option.path[0] == "hyperparameters" for option in options)
    groups: dict[str, list[Option]] = {name: [] for name in GROUPS}
    for option in options:
        groups[_group(option) if trains else "options"].append(option)
    for name, members in groups.items():
        group = parser.add_argument_group(name)
        for option in members:
            _add(group, option)
    return parser.format_help().rstrip()


def _add(group: Any, option: Option) -> None:
    meaning = " ".join([*option.help.split(), *_default(option)]).replace("%", "%%")
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
    """Returns the group of a training's option, by the fields that lead to it."""
    holder, field = option.path[0], option.path[-1]
    if holder in ("environment", "env_options", "transforms", "imports"):
        return "environment"
    if "network" in option.path[:-1] or holder == "network_name":
        return "network"
    if holder in ("hyperparameters", "algorithm", "recipe"):
        return "algorithm"
    if holder not in ("run", "config"):
        return "options"
    return next((group for group, names in _OF_RUNS.items() if field.replace("_", "-") in names), "placement")


_OF_RUNS = {"run": RUN, "evaluation": EVALUATION, "recording": RECORDING, "fusion": FUSION}
