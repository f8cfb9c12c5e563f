"""Adds the docstrings of fields to what `help` prints for a dataclass or a named tuple."""

import dataclasses
import inspect
import textwrap
from typing import Any, TypeVar

from rollmill.core.options import field_docs

T = TypeVar("T", bound=type)


def with_field_help(kind: T) -> T:
    """Extends the docstring of a dataclass with the defaults and docstrings of its fields.

    The source is parsed when the docstring is read, and not when the class is created. The signature of the class
    is shown without annotations, because the fields show them.
    """
    signature = inspect.signature(kind)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    kind.__signature__ = inspect.Signature(plain)  # pyright: ignore[reportAttributeAccessIssue]
    kind.__doc__ = _FieldHelp(kind.__doc__ or "")  # pyright: ignore[reportAttributeAccessIssue]
    return kind


def with_tuple_help(kind: T) -> T:
    """Extends the docstring of a named tuple with its required fields, defaults and field docstrings.

    Reading it also gives each field its own docstring instead of `Alias for field number 0`.
    """
    kind.__doc__ = _TupleHelp(kind.__doc__ or "")  # pyright: ignore[reportAttributeAccessIssue]
    return kind


class _TupleHelp:
    """A docstring computed on access, which sets the docstrings of the fields."""

    def __init__(self, summary: str) -> None:
        self.summary = summary

    def __get__(self, instance: Any, owner: Any) -> str:
        docs, defaults = field_docs(owner), owner._field_defaults
        lines = []
        for name in owner._fields:
            default = f"default {defaults[name]!r}" if name in defaults else "required"
            lines.append(_lines(f"{name} ({default})", docs.get(name, "")))
            if name in docs:
                vars(owner)[name].__doc__ = docs[name]
        return "\n".join([self.summary.rstrip(), "", "    Attributes:", *lines, "    "])


class _FieldHelp:
    """A docstring computed on access for each class."""

    def __init__(self, summary: str) -> None:
        self.summary = summary

    def __get__(self, instance: Any, owner: type) -> str:
        docs = field_docs(owner)
        lines = [_entry(field, docs[field.name]) for field in dataclasses.fields(owner) if field.name in docs]
        return "\n".join([self.summary.rstrip(), "", "    Attributes:", *lines, "    "]) if lines else self.summary


def _entry(field: Any, text: str) -> str:
    """Returns the lines of a field: its name, its default unless a factory makes it, and its docstring."""
    default = "" if field.default is dataclasses.MISSING else f" (default {field.default!r})"
    return _lines(f"{field.name}{default}", text)


def _lines(name: str, text: str) -> str:
    body = f"{name}: {' '.join(text.split())}"
    return textwrap.fill(body, 100, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
