"""Every name that a page uses, of a colour or of a class, is one that its style sheet defines."""

import ast
import re
from pathlib import Path

import rollmill
from profiling.by_hand import process, profile
from profiling.pages import ReadPage
from rollmill.pages import charts
from rollmill.pages.page import asset
from rollmill.plotting.groups import Curves, SeedCurve, group_curves
from rollmill.plotting.html import curves_page
from rollmill.profiler.advice import with_advice
from rollmill.profiler.report.comparison import compare, comparison_page
from rollmill.profiler.report.html import profile_page
from rollmill.profiling.classes import HOST_CALLS, INNER
from rollmill.profiling.results import CATEGORIES, HostTime
from rollmill.record.metric_curves import MetricPoint

SOURCE = Path(rollmill.__file__).parent
EVERY_CATEGORY = tuple(HostTime(f"some {name}", name, 0.001) for name in CATEGORIES)


def categories_of_spans() -> set[str]:
    """The categories that are written in calls of `span` and of classes that open one, in all of the source."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name == "span" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                found.add(node.args[1].value)
    return found


def colours_of(style: str) -> list[set[str]]:
    """The names that are defined in each block `:root` of a style sheet: the light one and the dark one."""
    blocks = [set(re.findall(r"--(\w+):", block)) for block in re.findall(r":root \{([^}]*)\}", style)]
    assert len(blocks) == 2 and blocks[0] == blocks[1]
    return blocks


def check_names(text: str) -> set[str]:
    """Checks the names that a page uses, and returns those of colours."""
    page = ReadPage(text)
    style = "".join(page.texts["style"])
    defined = colours_of(style)[0]
    used = set(re.findall(r"var\(--(\w+)\)", text))
    classes = {name for _, each in page.attributes for name in (each.get("class") or "").split()}
    assert used <= defined, used - defined
    selectors = re.sub(r"\{[^{}]*\}", " ", re.sub(r"@media[^{]*\{", " ", style))
    known = set(re.findall(r"\.(\w[\w-]*)", selectors))
    assert classes <= known, classes - known
    return used


def test_every_category_has_a_colour_on_the_page():
    text = profile_page(with_advice(profile(processes=[process(host=EVERY_CATEGORY)])))
    assert set(CATEGORIES) <= check_names(text)


def test_every_name_of_a_page_without_much_and_of_a_comparison_is_defined():
    full = profile(processes=[process(f"actor/{index}", host=EVERY_CATEGORY) for index in range(70)])
    bare = profile(
        operations=(), memory=(), devices=(), ceilings=None, book_keeping=(), processes=[process(host=())]
    )
    for text in (profile_page(full), profile_page(bare), comparison_page(compare(full, full))):
        check_names(text)


def test_every_name_of_a_page_with_more_curves_than_colours_is_defined():
    points = [MetricPoint(100.0, 2.0, 1.0), MetricPoint(200.0, 3.0, 2.0)]
    curves = [SeedCurve(f"run{rate}", {"learning_rate": rate}, points) for rate in range(12)]
    used = check_names(curves_page(Curves("episode/return", 0.0, group_curves(curves)), ["steps", "seconds"]))
    assert {f"c{number}" for number in range(8)} <= used


def test_every_category_that_the_profiler_gives_is_listed():
    given = {category for _, _, category in HOST_CALLS} | categories_of_spans()
    assert {"cuda", "storage", "waiting", "dispatch"} <= given
    assert given - {INNER} <= set(CATEGORIES)


def test_scripts_of_pages_use_classes_that_are_defined():
    style = asset(charts.__name__, "page.css")
    scripts = "".join(file.read_text("utf-8") for file in SOURCE.rglob("*.js"))
    given = re.findall(r"className = \"([\w -]+)\"|classList\.add\(\"([\w-]+)\"\)", scripts)
    names = {name for pair in given for text in pair for name in text.split()}
    assert names and names <= set(re.findall(r"\.(\w[\w-]*)", style))
