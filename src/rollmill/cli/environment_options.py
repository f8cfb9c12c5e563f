"""The option `--env-option KEY=VALUE`: options of an environment."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import tyro

from rollmill.core.errors import DataError, UsageError
from rollmill.core.json_data import parse_json
from rollmill.envs.named_transforms import OPTION, parse_transforms

EnvOptions: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="env-option",
        metavar="KEY=VALUE",
        help="Option of the environment, such as max_steps=100; true, false, null, numbers, lists and objects are "
        "parsed as JSON, all else is text. May be given several times.",
    ),
    tyro.conf.UseAppendAction,
]

Transforms: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="transform",
        metavar="NAME[:ARGUMENT]",
        help="Change of the environment's observations, actions or rewards, such as frame-stack:4; "
        "`rollmill list` shows them. May be given several times, the innermost first.",
    ),
    tyro.conf.UseAppendAction,
]

NOT_JSON = {"True": "true", "False": "false", "None": "null", "NaN": None, "nan": None, "inf": None}
"""Python's words for values, with their JSON form; None if JSON has no such value."""


def parse_env_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses options given as `KEY=VALUE`.

    Raises:
        UsageError: one is not a pair, is given twice, or has a value in Python's form instead of JSON's.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"--env-option {text!r} has to be KEY=VALUE, such as max_steps=100.")
        if key in options:
            raise UsageError(f"--env-option {key} is given twice, as {options[key]!r} and as {value!r}.")
        options[key] = _value(text, value)
    return options


def chosen_environment_options(env_options: Sequence[str], transforms: Sequence[str]) -> dict[str, Any]:
    """The options of an environment, with its transforms.

    Raises:
        UsageError: an option is wrong, a transform does not exist, or transforms are given in both ways.
    """
    options = parse_env_options(env_options)
    if transforms and OPTION in options:
        raise UsageError(f"--transform and --env-option {OPTION} give the same; leave one of them out.")
    return {**options, OPTION: [str(parsed) for parsed in parse_transforms(transforms)]} if transforms else options


def _value(option: str, text: str) -> Any:
    if text in NOT_JSON:
        json_form = NOT_JSON[text]
        hint = f"write {json_form}, or " if json_form else ""
        raise UsageError(
            f'--env-option {option}: {text} is not JSON; {hint}"{text}" in double quotes for the text.'
        )
    try:
        json.loads(text)
    except ValueError:
        return text
    try:
        return parse_json(text, where=f"--env-option {option}")
    except DataError as error:
        raise UsageError(str(error)) from None
