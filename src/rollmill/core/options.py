"""Derives a command's options from the fields of a dataclass."""

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from rollmill.core.schema import coerce
from rollmill.core.stored_paths import OfRun, RunPath
from rollmill.core.text_values import count_of


@dataclasses.dataclass(frozen=True)
class Arg:
    """Sets properties of a field's option in its annotation:
    `seed: Annotated[int, Arg(help="Seed of the policy.")]`.
    """

    name: str | None = None
    """Name of the option, if it differs from the field's name. The empty string on a field with a nested dataclass
    means that its options get no prefix."""
    metavar: str | None = None
    """Placeholder for the value in `--help`, such as `FOLDER`."""
    help: str | None = None
    """Description of the option. Default: the docstring of the field."""
    positional: bool = False
    """Whether the option is positional, so that it is given without a name."""
    repeated: bool = False
    """Whether the option is given once for each value."""
    only_on: bool = False
    """Whether the option is a flag without the form `--no-NAME`."""
    convert: Callable[[Any], Any] | None = None
    """Function that converts each value given on the command line or in an option file."""


class Option(NamedTuple):
    """One option of a command, derived from a field of its dataclass."""

    name: str
    """Name of the option without leading dashes."""
    path: tuple[str, ...]
    """Names of the fields that lead to the option's value."""
    annotation: Any
    """Annotation of the option's field, with its bounds."""
    hint: Any
    """Type of the option's field, without bounds."""
    default: Any
    """Default of the option, or `dataclasses.MISSING` if the option is required."""
    owner: type
    """Dataclass that defines the option's field."""
    arg: Arg

    @property
    def help(self) -> str:
        """Description of the option, which may be read from the source of its dataclass."""
        return field_docs(self.owner).get(self.path[-1], "") if self.arg.help is None else self.arg.help

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_flag(self) -> bool:
        """Whether the option is a flag, which is on, off or automatic, and takes no value."""
        return self.hint in (bool, bool | None) and not self.arg.positional

    @property
    def negated(self) -> str | None:
        """Returns the name that turns a flag off, such as `network.no-shared-torso`."""
        if not self.is_flag or self.arg.only_on:
            return None
        section, dot, last = self.name.rpartition(".")
        return f"{section}{dot}no-{last}"

    @property
    def count(self) -> int | None:
        """Number of arguments that follow the option, or None for any number."""
        return 0 if self.is_flag else 1 if self.arg.repeated else count_of(self.hint)

    @property
    def value_hint(self) -> Any:
        """Type of one value. For a repeated option, this is the type of an element."""
        return get_args(self.hint)[0] if self.arg.repeated else self.hint

    def coerce(self, value: Any, *, name: str | None = None) -> Any:
        """Converts a value from JSON, TOML or Python to the option's type (`schema.coerce`)."""
        name = ".".join(self.path) if name is None else name
        return coerce(name, self.annotation, value)

    @property
    def shown(self) -> str:
        """Name of the option as the user writes it."""
        return self.arg.metavar or self.name if self.arg.positional else f"--{self.name}"


def options_of(kind: type) -> list[Option]:
    """Returns the options of a command's dataclass, in the order of its own and nested fields."""
    return list(_options(kind, dataclasses.MISSING, "", ()))


def _options(kind: type, instance: Any, prefix: str, path: tuple[str, ...]) -> Iterator[Option]:
    annotated, plain = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        arg, hint = _arg_of(annotated[field.name]), _type_of(annotated[field.name], plain[field.name])
        default = _default(field) if instance is dataclasses.MISSING else getattr(instance, field.name)
        name = field.name.replace("_", "-") if arg.name is None else arg.name
        inner = (*path, field.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _options(hint, default, f"{prefix}{name}." if name else prefix, inner)
        else:
            yield Option(prefix + name, inner, annotated[field.name], hint, default, kind, arg)


def _type_of(annotated: Any, plain: Any) -> Any:
    """Returns the type of a field without its bounds. The type of a run's path keeps its mark."""
    if OfRun not in map(type, getattr(annotated, "__metadata__", ())):
        inner = annotated.__origin__ if get_origin(annotated) is Annotated else annotated
        return inner if RunPath in get_args(inner) else plain
    return RunPath


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _arg_of(hint: Any) -> Arg:
    return next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Arg)), Arg())


@cache
def field_docs(kind: type) -> Mapping[str, str]:
    """Returns the docstrings below the fields of a dataclass, inherited fields included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):  # a class without source code
            continue
        for statement, after in pairwise(getattr(body, "body", ())):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = inspect.cleandoc(text)
    return types.MappingProxyType(docs)


def build(kind: type, options: list[Option], values: Mapping[str, Any]) -> Any:
    """Returns an instance of a command's dataclass, given the values of options by name."""
    by_path = {option.path: values[option.name] for option in options if option.name in values}
    return _build(kind, dataclasses.MISSING, by_path)


def with_values(instance: Any, by_path: Mapping[tuple[str, ...], Any]) -> Any:
    """Returns a copy of a dataclass instance with some fields replaced.

    Each key is the path of field names to a value, through nested dataclasses.
    """
    return _build(type(instance), instance, by_path) if by_path else instance


def _build(kind: type, instance: Any, by_path: Mapping[tuple[str, ...], Any]) -> Any:
    hints, changed = get_type_hints(kind), {}
    defaults = {field.name: _default(field) for field in dataclasses.fields(kind)}
    for name in dict.fromkeys(path[0] for path in by_path):
        below = {path[1:]: value for path, value in by_path.items() if path[0] == name}
        if () in below:
            changed[name] = below[()]
            continue
        before = defaults[name] if instance is dataclasses.MISSING else getattr(instance, name)
        changed[name] = _build(hints[name], before, below)
    return kind(**changed) if instance is dataclasses.MISSING else dataclasses.replace(instance, **changed)


def metavar_of(option: Option) -> str:
    """Returns how `--help` shows the value of an option: `INT`, `{auto,mlp}`, `INT [INT ...]`."""
    if option.arg.metavar is not None:
        return option.arg.metavar
    return _name_type(option.value_hint)


def _name_type(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "|".join(_name_type(part) for part in parts if part is not types.NoneType)
    if origin is Annotated:
        return _name_type(parts[0])
    if parts and origin in (tuple, list):
        if origin is tuple and Ellipsis not in parts:
            return " ".join(map(_name_type, parts))
        inner = _name_type(parts[0])
        return f"[{inner} ...]"
    if parts and origin is dict:
        return f"[NAME {_name_type(parts[1])} ...]"
    if parts and origin is not None:  # a type with alternatives or elements
        return f"{{{','.join(map(str, parts))}}}"
    return {str: "TEXT"}.get(hint, getattr(hint, "__name__", "VALUE").upper())
