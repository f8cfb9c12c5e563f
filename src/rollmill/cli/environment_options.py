"""The option `--env-option KEY=VALUE`: options of an environment."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import tyro

from rollmill.envs import parse_options

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


def parse_env_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the values of `--env-option`.

    Raises:
        UsageError: one is not a pair, is given twice, or has a value in Python's form instead of JSON's.
    """
    return parse_options(texts, flag="--env-option")
