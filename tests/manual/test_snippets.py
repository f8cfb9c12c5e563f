"""Every snippet of README and manual runs, or says why it cannot; all name options and functions that exist."""

import ast
import contextlib
import io
import re
import shlex
import textwrap
from functools import cache

import pytest

import rollmill
from manual.snippets import OTHER_LANGUAGES, PAGES, REASONS, ROOT, RUN_LANGUAGES, commands_of, snippets_of
from rollmill.cli import main

ALL = [snippet for page in PAGES for snippet in snippets_of(page)]
RUNNABLE = [snippet for snippet in ALL if snippet.language in RUN_LANGUAGES]
NOT_RUN = [snippet for snippet in RUNNABLE if snippet.not_run]
WITH_SUBJECT = ("train", "plan", "profile", "sweep")
"""Commands whose options depend on the algorithm."""


LONG = {"docs/how-do-i.md", "docs/index.md"}
"""Pages whose fast snippets together take half a minute."""


def names(snippets):
    return sorted({snippet.page for snippet in snippets})


def fast_pages():
    pages = names(one for one in RUNNABLE if not one.slow and not one.not_run)
    return [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in pages]


@pytest.mark.parametrize("page", fast_pages())
def test_the_fast_snippets_of_a_page_run(page, run_page):
    done = run_page(page, slow=False)
    assert done["error"] is None, done["error"] + "\n" + done["printed"]


@pytest.mark.slow
@pytest.mark.parametrize("page", names(one for one in RUNNABLE if one.slow and not one.not_run))
def test_all_snippets_of_a_page_run(page, run_page):
    done = run_page(page, slow=True)
    assert done["error"] is None, done["error"] + "\n" + done["printed"]


def test_snippets_that_are_not_run_are_few_and_say_why():
    assert {snippet.not_run for snippet in NOT_RUN} <= set(REASONS)
    assert len(NOT_RUN) <= 0.15 * len(RUNNABLE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_language_and_every_mark_a_block(page):
    text = page.read_text()
    found = snippets_of(page)
    assert {snippet.language for snippet in found} <= {*RUN_LANGUAGES, *OTHER_LANGUAGES}
    assert len(re.findall(r"^\s*```", text, re.M)) == 2 * len(found)
    assert len(re.findall(r"<!-- snippet:", text)) == len(re.findall(r"^<!-- snippet: .* -->\n```", text, re.M))


@cache
def help_of(words):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help-all"])
    return printed.getvalue()


def rollmill_commands():
    """Words of all commands that name a built-in algorithm or need none."""
    for snippet in (one for one in RUNNABLE if one.not_run != "example"):
        for command in commands_of(snippet.text) if snippet.language == "bash" else ():
            words = shlex.split(command)
            words = words[1:] if words[0].startswith("PYTHONPATH=") else words
            if words[0] == "rollmill" and "--import" not in words:
                yield pytest.param(words[1:], id=f"{snippet.place}-{' '.join(words[1:3])}")


@pytest.mark.parametrize("words", list(rollmill_commands()))
def test_every_option_of_a_command_exists(words):
    options = {re.sub(r"^--no-|^--", "--", word).partition("=")[0] for word in words if word.startswith("--")}
    subject = (
        words[:2] if words[0] in WITH_SUBJECT and len(words) > 1 and not words[1].startswith("-") else words[:1]
    )
    if subject == ["train"]:  # the file of --config names the algorithm
        subject = ["train", "ppo"]
    subject = ["train", *subject[1:]] if subject[0] == "sweep" and len(subject) > 1 else subject
    known = set(re.findall(r"--[\w.-]+", help_of(tuple(subject)) + help_of(tuple(words[:1])))) | {"--help"}
    assert options <= known


@pytest.mark.parametrize(
    "snippet", [one for one in RUNNABLE if one.language == "python"], ids=lambda one: one.place
)
def test_every_name_of_rollmill_exists(snippet):
    for node in ast.walk(ast.parse(textwrap.dedent(snippet.text))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rollmill":
            assert hasattr(rollmill, node.attr)
