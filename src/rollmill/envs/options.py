"""Reads the options of environments: lists a factory's options, parses values, and reports unknown names."""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollmill.core.errors import DataError, UsageError
from rollmill.core.json_data import parse_json

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

NOT_JSON = {"True": "true", "False": "false", "None": "null", "NaN": None, "nan": None, "inf": None}
"""Python literals with their JSON form, or None if JSON has no such value."""


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the keyword arguments that a function or class accepts.

    If the `__init__` of a class passes keyword arguments on to its bases, the bases' arguments with defaults are
    included.
    """
    if not inspect.isclass(function):
        return _parameter_names(function)
    names: list[str] = []
    for number, owner in enumerate(c for c in function.__mro__ if "__init__" in vars(c) and c is not object):
        names += _parameter_names(owner.__init__, only_defaults=number > 0)
        if not takes_any(owner.__init__):
            break
    return [name for name in dict.fromkeys(names) if name != "self"]


def takes_any(function: Callable[..., Any]) -> bool:
    """Returns whether a function accepts arbitrary keyword arguments."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _parameter_names(function: Callable[..., Any], *, only_defaults: bool = False) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in _VARIADIC and not (only_defaults and parameter.default is parameter.empty)
    ]


def unknown_option(environment: str, option: str, known: Iterable[str]) -> UsageError:
    """Returns the error for an unknown environment option. It lists all options, and suggests the nearest."""
    names = sorted(known)
    if not names:
        return UsageError(f"{environment} has no options, got {option!r}.")
    near = difflib.get_close_matches(option, names, n=1)
    suggestion = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{environment} has no option {option!r}. {suggestion}Its options are {', '.join(names)}.")


def check_flags(environment: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises a `UsageError` for an option that `function` annotates as `bool`, and that is neither true nor false.

    Python treats any string other than the empty one as true, such as `no` in `--env-option flat=no`.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # functions in C have no signature
        return
    for option, value in options.items():
        is_flag = option in parameters and parameters[option].annotation in (bool, "bool")
        if is_flag and not isinstance(value, bool):
            raise UsageError(
                f"{environment}: {option}={value!r} must be True or False. hint: on the command line, use "
                f"--env-option {option}=true or --env-option {option}=false."
            )


def like(environment: str, option: str, value: Any, default: Any) -> Any:
    """Converts an option's value to the type of its default: an integer to a float, or a list to a tuple.

    Raises a `UsageError` if the value has another type.
    """
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list | tuple) and len(value) == len(default):
        return tuple(like(environment, option, *pair) for pair in zip(value, default, strict=True))
    if isinstance(default, bool | int | float | str | tuple) and type(value) is not type(default):
        raise UsageError(
            f"{environment}: {option}={value!r} must be of type {type(default).__name__}, like its default "
            f"{default!r}."
        )
    return value


def parse_options(texts: Sequence[str], *, flag: str) -> dict[str, Any]:
    """Parses options given as `KEY=VALUE`.

    Args:
        texts: one string per option. JSON literals, lists and objects are parsed as JSON, and anything else is a
            string.
        flag: name of the command-line option, for messages.

    Raises:
        UsageError: an option is not a pair, is given twice, or has a Python literal instead of JSON.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"{flag} {text!r} must be KEY=VALUE, such as max_steps=100.")
        if key in options:
            raise UsageError(f"{flag} {key} was given twice, as {options[key]!r} and as {value!r}.")
        options[key] = _value(flag, text, value)
    return options


def option_text(name: str, value: Any) -> str:
    """Returns `KEY=VALUE` for an option, from which `parse_options` reads the same value."""
    if isinstance(value, str) and value not in NOT_JSON:
        try:
            json.loads(value)
        except ValueError:
            return f"{name}={value}"
    return f"{name}={json.dumps(value)}"


def _value(flag: str, option: str, text: str) -> Any:
    if text in NOT_JSON:
        json_form = NOT_JSON[text]
        hint = f"write {json_form}, or " if json_form else ""
        raise UsageError(
            f'{flag} {option}: {text} is not valid JSON. hint: {hint}write "{text}" in double quotes for a string.'
        )
    try:
        json.loads(text)
    except ValueError:
        return text
    try:
        return parse_json(text, where=f"{flag} {option}")
    except DataError as error:
        raise UsageError(str(error)) from None
