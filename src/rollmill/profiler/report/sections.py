"""Sections of a report, described once and drawn both on a page and in a terminal."""

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollmill.core.text import one_line
from rollmill.pages.page import section

MIN_SHOWN = 0.0005
"""Smallest share of the whole time for which reports show an operation."""


class Section(NamedTuple):
    """A section of a report. The page shows `title`, `how` and `body`, and the terminal shows the other fields."""

    title: str
    how: str
    """Explanation of how to read the figure."""
    body: Sequence[str]
    """HTML parts of the section. If there are none, the page leaves the section out."""
    heading: str = ""
    unit: str = ""
    columns: Sequence[str] = ()
    """Titles of the table's columns. A title that begins with a blank belongs to a column of strings."""
    rows: Sequence[Sequence[str | Text]] = ()
    below: Sequence[RenderableType] = ()
    """Lines shown below the table."""


def drawn_on_page(sections: Iterable[Section]) -> list[str]:
    """Renders all report sections that have a body as HTML."""
    return [section(one.title, one.how, [part for part in one.body if part]) for one in sections if one.body]


def drawn_in_terminal(sections: Iterable[Section]) -> list[RenderableType]:
    """Renders all report sections that have text for a terminal, each after an empty line."""
    drawn: list[RenderableType] = []
    for one in sections:
        heading = Text.assemble((one.heading, "bold"), (f"  {one.unit}" if one.unit else "", "dim"))
        parts: list[RenderableType] = [heading] if one.heading else []
        parts += [_table(one.columns, one.rows)] if one.columns else []
        parts += one.below
        drawn += [Text(""), Group(*parts)] if parts else []
    return drawn


def as_text(view: RenderableType, *, width: int) -> str:
    """Renders `view` as plain text, `width` columns wide, without colour or trailing blanks."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=False, color_system=None, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(view)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def paragraph(text: str, *, indent: int = 2, style: str = "") -> RenderableType:
    """Returns an indented paragraph that wraps at the width of the terminal."""
    return Padding(Text(one_line(text), style=style), (0, 0, 0, indent))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Returns a table of names and figures. A terminal that is too narrow cuts names, and never figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    first, *others = columns
    table.add_column(_name(first))
    is_text = [title.startswith(" ") for title in others]
    for title, wraps in zip(others, is_text, strict=True):
        name = Text(one_line(title.strip()), no_wrap=True, overflow="ellipsis")
        table.add_column(name, justify="left" if wraps else "right", no_wrap=not wraps)
    for label, *cells in rows:
        texts = [_name(cell, indent=0) if wraps else cell for cell, wraps in zip(cells, is_text, strict=True)]
        table.add_row(_name(label), *texts)
    return table


def _name(name: str | Text, *, indent: int = 2) -> Text:
    """Returns a truncated name. Rich narrows only columns that may wrap, so the column itself may."""
    text = Text(" " * indent, no_wrap=True, overflow="ellipsis")
    return text.append(one_line(name)) if isinstance(name, str) else text.append_text(name)
