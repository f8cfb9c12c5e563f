"""Pages that follow from other files are up to date; the navigation names every page; figures are quoted ones."""

import re
import sys
from importlib import import_module

import pytest

from manual.snippets import BLOCK, PAGES, ROOT
from rollmill.cli.output import LOST_READER, UNWRITTEN
from rollmill.cli.serve import GAVE_UP
from rollmill.core.interruption import CHECKPOINT_REQUEST
from rollmill.record.signals import CAUGHT

sys.path.append(str(ROOT / "scripts"))
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages():
    pytest.importorskip("yaml", reason="the navigation is YAML, which the extra docs reads")
    return import_module("manual_pages")


def test_the_page_on_the_command_line_is_up_to_date(pages):
    assert (DOCS / "commands.md").read_text() == pages.command_page(), "run python scripts/manual_pages.py"


def test_the_index_for_language_models_is_up_to_date(pages):
    assert (DOCS / "llms.txt").read_text() == pages.llms_txt(), "run python scripts/manual_pages.py"


def test_the_index_of_the_reference_is_up_to_date(pages):
    assert (DOCS / "reference/index.md").read_text() == pages.reference_page(), (
        "run python scripts/manual_pages.py"
    )


def test_every_page_is_in_the_navigation_once(pages):
    named = [file for _, _, file in pages.navigation()]
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_a_paragraph_begins_with_a_space(page):
    assert not re.findall(r"^ \S.*", BLOCK.sub("", page.read_text()), re.M)


def test_the_readme_is_short_and_leads_to_the_first_pages_of_the_manual():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 900
    table = text.partition("## Documentation")[2].partition("##")[0]
    for page in ("tutorial", "extending", "multi_agent", "how-do-i", "troubleshooting", "architecture"):
        title = (DOCS / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")
        assert f"| [{title}](docs/{page}.md) |" in table
    policies = set(re.findall(r"--distribution ([\w-]+)", text))
    assert policies and all(f"| `{name}` |" in (DOCS / "distribution.md").read_text() for name in policies)
    assert "](docs/distribution.md)" in text.partition("--distribution")[0]


def test_every_command_has_its_options_on_the_page(pages):
    page = (DOCS / "commands.md").read_text()
    assert re.findall(r"^## rollmill (\w+)", page, re.M) == list(pages.COMMANDS)
    options = set(re.findall(r"^\| `(--[\w.-]+)", page, re.M))
    assert {"--evaluate-every", "--over", "--gpu-sharing", "--max-batch", "--against", "--search-plan"} <= options


def test_every_exit_code_of_the_package_is_on_the_page():
    """Those of errors, of signals that end a command, and of commands that say how they ended."""
    source = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    errors = {0, *(int(code) for code in re.findall(r"^    exit_code = (\d+)$", source, re.M))}
    assert {GAVE_UP, UNWRITTEN} <= errors
    signals = {128 + number for number in CAUGHT if number != CHECKPOINT_REQUEST}
    listed = (DOCS / "commands.md").read_text().partition("## Exit codes")[2]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", listed, re.M)} == errors | signals | {LOST_READER}


def test_the_figures_that_help_to_choose_are_those_of_other_pages():
    """Every rate and ratio on the page is in a table that a benchmark wrote, or in the page on results."""
    sources = [DOCS / f"{name}.md" for name in ("results", "distribution", "fusion", "instances")]
    known = set(re.findall(r"\d[\d.,]*", " ".join(source.read_text() for source in sources)))
    rows = re.findall(r"^\|.*\|$", (DOCS / "choosing.md").read_text(), re.M)
    figures = {figure for row in rows for figure in re.findall(r"(?<![\w-])\d+\.\d+(?!\w)|\d+(?= (?:k|s)\b)", row)}
    assert len(figures) > 20
    assert figures <= known
