"""Parts of an HTML page that loads nothing: frame, sections, tables, legends and bars."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import chain, repeat
from typing import NamedTuple

from rollmill.core.text import one_line, truncate

MAX_TEXT, MAX_NAME = 800, 50
"""Characters of a paragraph and of a name, after which they are cut: pages stay small for any profile."""


class BarPart(NamedTuple):
    """One coloured part of a stacked bar."""

    share: float
    """Share of the bar's full width, from 0 to 1."""
    colour: str
    """Name of one of the page's colours."""
    title: str
    is_hatched: bool = False


def escape_html(text: str, *, most: int = MAX_TEXT) -> str:
    """Escapes a string for an HTML page and for quoted attributes.

    The string is truncated to `most` characters, or fewer if they take more than `2 * most` bytes.
    """
    shown = one_line(truncate(text, most))
    made = escape(shown)
    return made if len(made.encode()) <= 2 * most else escape(truncate(shown, most // 5))


def escaped_name(name: str) -> str:
    """Escapes a name for an HTML page, shortened if it is long."""
    return escape_html(name, most=MAX_NAME)


def page(title: str, body: Iterable[str], *, script: str = "", style: str = "", sources: str = "") -> str:
    """Returns a whole HTML page.

    Its content security policy lets a browser load nothing, and run no script but the page's own, even if text
    were not escaped. Without the script the page is complete, but not interactive.

    Args:
        title: title of the page, in plain text.
        body: content of the page, as HTML.
        script: script of the page.
        style: additional CSS rules.
        sources: additional directives of the content security policy, such as `img-src data:`.
    """
    style = asset(__name__, "page.css") + style
    digest = b64encode(sha256(script.encode()).digest()).decode()
    scripts = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}"
    policy += f"; {sources}" if sources else ""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_html(title)}</title>",
            f"<style>\n{style}</style></head><body>",
            *body,
            f"<script>{script}</script>" if script else "",
            "</body></html>\n",
        ]
    )


def asset(module: str, name: str) -> str:
    """Reads a text file from the folder of a module."""
    return (files(module.rpartition(".")[0]) / name).read_text("utf-8")


def section(title: str, how: str, body: Iterable[str]) -> str:
    """Returns a figure or table as HTML, with a title and a sentence on how to read it, both in plain text."""
    explained = f'<p class="how">{escape_html(how)}</p>' if how else ""
    return "\n".join([f"<section><h2>{escape_html(title)}</h2>{explained}", *body, "</section>"])


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Returns large figures as HTML, each with a few words on its meaning."""
    made = (
        f'<div class="tile"><b>{escape_html(value)}</b><span>{escape_html(text)}</span></div>'
        for value, text in figures
    )
    return f'<div class="tiles">{"".join(made)}</div>'


def legend(
    colours: Mapping[str, str] | Sequence[tuple[str, str]], *, hatched: str = "", most: int = MAX_NAME
) -> str:
    """Returns a legend as HTML: names, shortened to `most` characters, with their colours.

    If `hatched` is one of the names, its colour is hatched.
    """
    marks = [
        f'<span><i style="background:var(--{colour})"></i>{escape_html(name, most=most)}</span>'
        for name, colour in (colours.items() if isinstance(colours, Mapping) else colours)
    ]
    if hatched:
        marks.append(
            f'<span><i class="hatch" style="background-color:var(--device)"></i>{escape_html(hatched)}</span>'
        )
    return f'<div class="legend">{"".join(marks)}</div>'


def bar(parts: Iterable[BarPart], *, kind: str = "") -> str:
    """Returns a stacked bar as HTML, without parts that are too small to see."""
    return f'<div class="bar {kind}">{"".join(_part(part) for part in parts if part.share > 0.0002)}</div>'


def _part(part: BarPart) -> str:
    hatch = ' class="hatch"' if part.is_hatched else ""
    style = f"width:{min(part.share, 1.0) * 100:.2f}%;background-color:var(--{part.colour})"
    return f'<i{hatch} style="{style}" title="{escape_html(part.title, most=2 * MAX_NAME)}"></i>'


def bar_row(
    name: str,
    parts: Iterable[BarPart],
    value: str,
    *,
    depth: int = 0,
    is_outer: bool = False,
    below: Iterable[BarPart] | None = None,
) -> str:
    """Returns a row of a bar chart as HTML: a name indented by `depth` steps, one or two bars, and a label.

    The names of outer rows (`is_outer`) are emphasised.
    """
    bars = bar(parts) if below is None else bar(parts, kind="thin") + bar(below, kind="thin")
    kind = " outer" if is_outer else ""
    indent = f' style="padding-left:{depth * 1.1:.1f}em"' if depth else ""
    return (
        f'<div class="row{kind}"><div class="name"{indent}>{escaped_name(name)}</div>'
        f'<div class="bars">{bars}</div><div class="value">{escape_html(value)}</div></div>'
    )


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (),
    most: int = MAX_NAME,
    num_marked: int = 0,
) -> str:
    """Returns a table of plain text as HTML. It scrolls sideways if it does not fit.

    The first cell of a row is shortened to `most` characters, and its leading spaces indent it. The other columns
    are numeric and right-aligned, except those with the indices `left`. The first `num_marked` rows are
    emphasised.
    """
    sides = [' class="left"' if index in left else "" for index in range(len(columns))]
    head = "".join(f"<th{side}>{escaped_name(name)}</th>" for name, side in zip(columns, sides, strict=True))
    starts = chain(repeat('<tr class="marked">', num_marked), repeat("<tr>"))
    lines = [
        start + _name_cell(row[0], most) + "".join(map(_cell, row[1:], sides[1:])) + "</tr>"
        for start, row in zip(starts, rows, strict=False)
    ]
    return "\n".join(
        [f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>', *lines, "</tbody></table></div>"]
    )


def _name_cell(text: str, most: int) -> str:
    depth = (len(text) - len(text.lstrip(" "))) // 2
    return (
        f'<td class="name" style="padding-left:{depth * 1.1:.1f}em">{escape_html(text.strip(" "), most=most)}</td>'
    )


def _cell(text: str, side: str) -> str:
    return f"<td{side}>{escaped_name(text)}</td>"


def folding_section(summary: str, body: Iterable[str]) -> str:
    """Returns a part of a page as HTML that opens when its summary is clicked."""
    return "\n".join([f"<details><summary>{escape_html(summary)}</summary>", *body, "</details>"])


def folded_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns the values of a chart as an HTML table that opens on a click."""
    return folding_section("the same as a table", [table(columns, rows)])


def ratio(part: float, whole: float) -> float:
    """Returns a part divided by a whole, at least 0."""
    return max(part, 0.0) / whole if whole > 0 else 0.0
