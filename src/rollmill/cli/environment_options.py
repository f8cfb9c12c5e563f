"""The option `--env-option KEY=VALUE`: options of an environment."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.options import Arg
from rollmill.envs import parse_options
from rollmill.envs.named_transforms import OPTION, parse_transforms

EnvOptions: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name="env-option",
        metavar="KEY=VALUE",
        help="Option of the environment, such as max_steps=100; true, false, null, numbers, lists and objects are "
        "parsed as JSON, all else is text. May be given several times.",
        repeated=True,
    ),
]

Transforms: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name="transform",
        metavar="NAME[:ARGUMENT]",
        help="Change of the environment's observations, actions or rewards, such as frame-stack:4; "
        "`rollmill list` shows them. May be given several times, the innermost first.",
        repeated=True,
    ),
]


def parse_env_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the values of `--env-option`.

    Raises:
        UsageError: one is not a pair, is given twice, or has a value in Python's form instead of JSON's.
    """
    return parse_options(texts, flag="--env-option")


def chosen_environment_options(env_options: Sequence[str], transforms: Sequence[str]) -> dict[str, Any]:
    """The options of an environment, with its transforms.

    Raises:
        UsageError: an option is wrong, a transform does not exist, or transforms are given in both ways.
    """
    options = parse_env_options(env_options)
    if transforms and OPTION in options:
        raise UsageError(f"--transform and --env-option {OPTION} give the same; leave one of them out.")
    return {**options, OPTION: [str(parsed) for parsed in parse_transforms(transforms)]} if transforms else options
