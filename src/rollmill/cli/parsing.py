"""Parses the arguments of a command into a dataclass, whose fields are the options."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rollmill.cli.argument_values import no_algorithms, place_positional, read_words
from rollmill.cli.help import help_text
from rollmill.core.local_paths import check_local_paths
from rollmill.core.options import build, options_of

HELP_ALL = "--help-all"
HELP = {"-h", "--help", HELP_ALL}


class Parsed(NamedTuple):
    """The parsed arguments of a command."""

    options: Any
    """Values of all options, as an instance of the command's dataclass."""
    given: Mapping[str, Any]
    """Values of the options that the user gave, by name without leading dashes."""


def override(under: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of both mappings, by name. Those in `given` take precedence."""
    return {**under, **given}


def parse(kind: Any, arguments: Sequence[str], *, prog: str) -> Any:
    """Parses the arguments of a command into an instance of `kind`. `--help` prints a help text and exits.

    Raises a `UsageError` for unknown options, invalid values, and missing or surplus arguments.
    """
    return parse_given(kind, arguments, prog=prog).options


def parse_given(
    kind: Any,
    arguments: Sequence[str],
    *,
    prog: str,
    under: Mapping[str, Any] = MappingProxyType({}),
    merge: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = override,
    algorithms_with: Callable[[str], Sequence[str]] = no_algorithms,
) -> Parsed:
    """Parses the arguments of a command, and also returns which options were given. Raises the errors of `parse`.

    `merge(under, given)` combines the values in `under` with those of the arguments. By default, the arguments
    override them, by name. Messages refer to the command as `prog`. For an option that the command does not have,
    they name the algorithms that have it, which `algorithms_with` returns.
    """
    options = options_of(kind)
    if HELP & set(arguments):
        everything = HELP_ALL in arguments
        print(help_text(options, prog=prog, description=description_of(kind), everything=everything))
        raise SystemExit(0)
    read = read_words(options, arguments, prog=prog, algorithms_with=algorithms_with)
    given = merge(under, {**place_positional(options, read.positional, prog=prog), **read.given})
    parsed = build(kind, options, given)
    check_local_paths(parsed)
    return Parsed(parsed, given)


def parse_known(kind: Any, arguments: Sequence[str], *, prog: str) -> Parsed:
    """Parses the options of `kind` among the arguments, and ignores all others."""
    options = options_of(kind)
    given = read_words(options, arguments, prog=prog, strict=False).given
    return Parsed(build(kind, options, given), given)


def positional_words(kind: Any, arguments: Sequence[str], *, prog: str) -> list[str]:
    """Returns the arguments that are neither options of `kind` nor their values."""
    return read_words(options_of(kind), arguments, prog=prog, strict=False).positional


def description_of(kind: type) -> str:
    """Returns the first paragraph of a command's docstring, or an empty string if it has none."""
    is_generated = (kind.__doc__ or "").startswith(f"{kind.__name__}(")  # by `dataclass`: the signature
    return "" if is_generated else (kind.__doc__ or "").partition("\n\n")[0]
