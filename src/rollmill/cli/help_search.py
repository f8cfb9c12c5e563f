"""The command `rollmill help WORD ...`, which searches the options of all commands."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, NamedTuple

from rollmill.cli.help import meaning_of, two_columns
from rollmill.cli.parsing import HELP, parse
from rollmill.core.options import Arg, Option, metavar_of, options_of

OPTIONS = {
    "resume": "resume:Resume",
    "sweep": "sweep:_New",
    "sweep --resume": "sweep:_Resumed",
    "plan": "plan:Showing",
    "profile": "profile:Profiling",
    "profile compare": "profile:Compare",
    "explain fusion": "explain:KernelOptions",
    "evaluate": "evaluate:Evaluate",
    "render": "render:Render",
    "runs": "runs:Runs",
    "plot": "plot:Plot",
    "play": "play:Play",
    "gpu": "gpu:_Listing",
    "gpu partition": "gpu:_Partition",
    "serve": "serve:Serve",
    "export": "export:ExportOptions",
    "list": "listing:List",
    "completion": "completion:Completion",
    "doctor": "doctor:Doctor",
}
"""Module and dataclass of each command's own options. Options of `rollmill train` are found separately."""


@dataclass(frozen=True)
class Help:
    """Search the options of all commands. Without a word, list the commands."""

    words: Annotated[tuple[str, ...], Arg(metavar="[WORD ...]", positional=True)] = ()
    """Words that the name or description of an option must contain, or the name of a command."""


class _Found(NamedTuple):
    """An option, and the commands or algorithms that have it."""

    option: Option
    owners: list[str]


def run(arguments: list[str]) -> int:
    """Prints the options that contain all words. Returns the exit code, which is 1 if there are none."""
    from rollmill.cli.main import COMMANDS, main, usage

    plain = [word if word in HELP else word.lstrip("-") for word in arguments]
    words = parse(Help, plain, prog="rollmill help").words
    if not words:
        print(usage())
        return 0
    if words[0] in COMMANDS and len(words) == 1:
        main([*words, "--help"])
    found = find_options([word.lower() for word in words])
    if not found:
        print(f"No option contains {' and '.join(map(repr, words))} in its name or description.")
        return 1
    rows = [(_form(one.option), f"{meaning_of(one.option)} [{', '.join(one.owners)}]") for one in found]
    print("\n".join(two_columns(rows)))
    return 0


def find_options(words: list[str]) -> list[_Found]:
    """Returns options whose names or descriptions contain all words, ignoring case. Names come first."""
    found: dict[tuple[str, str], _Found] = {}
    for owner, option in _all_options():
        text = f"{option.name} {option.name.replace('-', ' ')} {option.help}".lower()
        if all(word in text or word.replace("_", "-") in text for word in words):
            found.setdefault((option.name, meaning_of(option)), _Found(option, [])).owners.append(owner)
    in_name = lambda one: all(word.replace("_", "-") in one.option.name.replace(" ", "-") for word in words)
    return sorted(found.values(), key=lambda one: not in_name(one))


def _all_options() -> Iterator[tuple[str, Option]]:
    """Yields the options of each algorithm, then the options of single commands."""
    from rollmill.cli.requests import training_options
    from rollmill.runs.algorithms import ALGORITHMS

    by_algorithm = {name: training_options(name) for name, _ in ALGORITHMS.items()}
    shared: dict[tuple[str, str], list[str]] = {}
    for algorithm, options in by_algorithm.items():
        for option in options:
            shared.setdefault((option.name, meaning_of(option)), []).append(algorithm)
    for key, owners in shared.items():
        option = next(one for one in by_algorithm[owners[0]] if one.name == key[0])
        yield "train" if len(owners) == len(by_algorithm) else f"train {'|'.join(owners)}", option
    for command, place in OPTIONS.items():
        module, _, kind = place.partition(":")
        for option in options_of(getattr(import_module(f"rollmill.cli.{module}"), kind)):
            yield command, option


def _form(option: Option) -> str:
    if option.arg.positional:
        return option.shown
    return f"--{option.name}" if option.is_flag else f"--{option.name} {metavar_of(option)}"
