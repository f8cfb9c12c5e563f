"""Converts the arguments of a command to values of its options."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.options import Option
from rollmill.core.setting_names import ELSEWHERE, named_like, note_on
from rollmill.core.text_values import read_value


class ParsedWords(NamedTuple):
    """Arguments of a command: values of options, and positional arguments."""

    given: dict[str, Any]
    """Values of the options that were given, by name."""
    positional: list[str]
    """Arguments that belong to no option."""


class _Form(NamedTuple):
    """One way to write an option."""

    option: Option
    on: bool = True


def no_algorithms(option: str) -> Sequence[str]:
    """Returns no algorithms, for commands that have the same options for every algorithm."""
    return ()


def read_words(
    options: Sequence[Option],
    words: Sequence[str],
    *,
    prog: str,
    strict: bool = True,
    algorithms_with: Callable[[str], Sequence[str]] = no_algorithms,
) -> ParsedWords:
    """Converts the arguments of the command `prog` to values of its options.

    `strict` rejects unknown options. Otherwise they are ignored, and arguments after them count as positional.
    `algorithms_with` returns the algorithms that have an option, which the error about an unknown option names.
    Raises a `UsageError` if an option is unknown or its value is invalid.
    """
    named = [option for option in options if not option.arg.positional]
    forms = {option.name: _Form(option) for option in named}
    forms |= {option.negated: _Form(option, on=False) for option in named if option.negated}
    given: dict[str, Any] = {}
    positional: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or _is_number(word):
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        form = forms.get(name.removeprefix("--").replace("_", "-")) if word.startswith("--") else None
        if form is None:
            if strict:
                raise unknown_option(name, forms, prog=prog, algorithms_with=algorithms_with)
            continue
        if form.option.is_flag and (equals or (rest and rest[0].lower() in SWITCH_VALUES)):
            raise _switch_with_value(form, value if equals else rest[0])
        texts = [value] if equals else _take_value(rest, form.option.count)
        _keep(given, form, name, texts)
    return ParsedWords(given, positional)


def place_positional(options: Sequence[Option], words: Sequence[str], *, prog: str) -> dict[str, Any]:
    """Assigns positional arguments to a command's positional options, and returns their values by name.

    Raises a `UsageError` if an argument is missing or left over.
    """
    given: dict[str, Any] = {}
    rest = list(words)
    wanted = [option for option in options if option.arg.positional]
    for option in wanted:
        texts = _take_value(rest, option.count)
        if texts:
            given[option.name] = read_value(option.path[-1], option.hint, texts)
    missing = [option.shown for option in wanted if option.name not in given and option.is_required]
    if missing:
        raise UsageError(f"{prog} needs {' and '.join(missing)}. hint: `{prog} --help` describes the arguments.")
    if rest:
        raise UsageError(f"{prog} does not accept the argument {rest[0]!r}. hint: options begin with --.")
    return given


SHORT = {
    "c": "config",
    "d": "run-dir",
    "e": "episodes",
    "i": "import",
    "j": "json",
    "n": "num-envs",
    "o": "output",
    "q": "quiet",
    "r": "recipe",
    "s": "seed",
}
"""Options that other programs abbreviate by one letter."""


TRAINS, SETS = "num-seeds", "set"
"""Options of all commands that begin a training, and of the command that changes hyperparameters of a run."""


def unknown_option(
    name: str, known: Iterable[str], *, prog: str, algorithms_with: Callable[[str], Sequence[str]] = no_algorithms
) -> UsageError:
    """Returns an error about an unknown option. It names algorithms that have it, or similar options."""
    known = list(known)
    if len(name) == 2:
        meant = SHORT.get(name[1].lower())
        advice = f"Did you mean --{meant}?" if meant in known else f"`{prog} --help` lists the options."
        return UsageError(
            f"unknown option {name}. Options have no short forms, and begin with two dashes. {advice}"
        )
    if (note := note_on(name, known)) is not None:
        return UsageError(f"unknown option {name}. --{note}")
    plain = name.lstrip("-").replace("_", "-").lower()
    if TRAINS in known and (advice := ELSEWHERE.get(plain.replace("-", "_"))) is not None:
        return UsageError(f"unknown option {name}. {advice}")
    if algorithms := algorithms_with(plain):
        return UsageError(
            f"unknown option {name}. It is an option of {', '.join(algorithms)}. `{prog} --help` lists the "
            "options."
        )
    near = [f"--{option}" for option in options_like(name.lstrip("-"), known)]
    if SETS in known and not near:
        return UsageError(
            f"unknown option {name}. --{SETS} {plain.replace('-', '_')}=VALUE changes a hyperparameter, and "
            f"`{prog} --help` lists the options."
        )
    suggestion = f"Did you mean {' or '.join(near)}?" if near else f"`{prog} --help` lists the options."
    return UsageError(f"unknown option {name}. {suggestion}")


def options_like(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known options most similar to an unknown one, without leading dashes, the best match first."""
    names = {option for option in known if not option.rpartition(".")[2].startswith("no-")}
    meant = named_like(name, {option.replace("-", "_") for option in names})
    if meant is not None:
        return [meant.replace("_", "-")]
    plain = name.replace("_", "-").lower()
    ending = sorted(option for option in names if option.rpartition(".")[2] == plain)
    return ending or difflib.get_close_matches(plain, sorted(names), n=1, cutoff=0.6)


SWITCH_VALUES = {"true": True, "false": False}
"""Values that other programs take for a switch, in lower case."""


def _switch_with_value(form: _Form, value: str) -> UsageError:
    """Returns an error about a value for an option that takes none. It names the options to write instead."""
    option, given = form.option, SWITCH_VALUES.get(value.lower())
    names = {True: option.shown, False: f"--{option.negated}" if option.negated else None}
    wanted = list(names.values()) if given is None else [names[given == form.on]]
    write = " or ".join(name for name in wanted if name is not None)
    return UsageError(
        f"{names[form.on]} is a switch and takes no value, got {value}. hint: "
        f"{f'write {write}' if write else 'leave it out'}."
    )


def _keep(given: dict[str, Any], form: _Form, shown: str, texts: list[str]) -> None:
    """Keeps the last value of an option that was given again, or all values of a repeatable option."""
    option = form.option
    if option.is_flag:
        given[option.name] = form.on
        return
    value = read_value(shown, option.value_hint, texts)
    value = value if option.arg.convert is None else option.arg.convert(value)
    given[option.name] = (*given.get(option.name, ()), value) if option.arg.repeated else value


def _take_value(words: list[str], count: int | None) -> list[str]:
    """Removes the arguments of one value from the front, up to the next option, and returns them."""
    ends = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    number = ends if count is None else min(ends, count)
    taken = words[:number]
    del words[:number]
    return taken


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
