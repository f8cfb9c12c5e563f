"""Benchmarks that the documentation names exist and take the named options; its tables are those of the
results.
"""

import json
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from manual.snippets import ROOT

BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
PARSE = """
import argparse, importlib, json, sys, traceback

class Parsed(Exception): pass

def parse(self, parse_args=argparse.ArgumentParser.parse_args):
    parse_args(self)
    raise Parsed

argparse.ArgumentParser.parse_args = parse
path = list(sys.path)
for name, words in json.load(sys.stdin):
    sys.path[:] = path
    sys.argv = [f"benchmarks/{name}.py", *words]
    try:
        importlib.import_module(name).main()
    except Parsed:
        continue
    except ImportError:  # a peer is not installed
        continue
    except BaseException:
        print("\\n".join([" ".join(sys.argv), *traceback.format_exc().splitlines()[-3:]]))
"""


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("tables")
    sys.path.pop(0)


def test_named_scripts_exist():
    named = {name for page in PAGES for name in re.findall(r"\bbenchmarks/(\w+\.py)\b", page.read_text())}
    assert {name for name in named if not (BENCHMARKS / name).is_file()} == set()


def test_tables_are_those_of_the_results(tables):
    texts = {page.name: page.read_text() for page in PAGES if "<!-- table: " in page.read_text()}
    outdated = [name for name, text in texts.items() if tables.with_tables(text) != text]
    assert outdated == [], "run python benchmarks/tables.py"
    shown = {found[1] for text in texts.values() for found in tables.MARKED.findall(text)}
    assert shown == tables.TABLES.keys() - {"fields of ippo"}, "MAPPO's page explains the fields of both"


def commands():
    """Command lines of benchmarks in the documentation, and in the docstrings of scripts up to optional words."""
    command = re.compile(r"python (benchmarks/\w+\.py[^`\n]*(?:\n[^`\n|]*(?=`))?)")
    lines = [line for page in PAGES for line in command.findall(page.read_text())]
    for script in sorted(BENCHMARKS.glob("*.py")):
        usages = re.findall(r"^    (?:sudo )?python (benchmarks/\w+\.py.*)", script.read_text(), re.M)
        lines += [re.split(r"\[|  ", line)[0] for line in usages if "'{" not in line]
    words = [shlex.split(line.replace("\\", ""), comments=True) for line in dict.fromkeys(lines)]
    return [(name.removeprefix("benchmarks/").removesuffix(".py"), arguments) for name, *arguments in words]


def test_named_commands_are_understood():
    found = commands()
    assert len(found) > 60
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(found),
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
