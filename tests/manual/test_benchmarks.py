"""Benchmarks that the documentation names exist and take the named options; its tables are those of the
results.
"""

import json
import re
import shlex
import subprocess
import sys
from importlib import import_module

import numpy as np
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


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.pop(0)


def test_named_scripts_exist():
    named = {name for page in PAGES for name in re.findall(r"\bbenchmarks/(\w+\.py)\b", page.read_text())}
    assert {name for name in named if not (BENCHMARKS / name).is_file()} == set()


def test_tables_are_those_of_the_results():
    tables = import_module("tables")
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


def test_sides_take_turns():
    order, figures = [], iter(range(6))
    sides = {name: lambda name=name: order.append(name) or next(figures) for name in ("ours", "theirs")}
    measure = import_module("measure")
    found = measure.in_turns(sides, 2, warm_up=1)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert found == {"ours": [3, 4], "theirs": [2, 5]}
    figures = measure.spreads(found)
    assert figures["ours"] == {"median": 3.5, "runs": [3, 4]}
    assert measure.ratios(figures, "ours") == {"ours / theirs": 1.0}


def test_an_interquartile_mean_is_a_trimmed_mean():
    from scipy.stats import trim_mean  # a second, for the one process that needs it

    values = np.random.default_rng(0).normal(size=(3, 10))
    assert import_module("measure").interquartile_mean(values) == pytest.approx(trim_mean(values, 0.25, axis=None))


def test_a_stratified_bootstrap_draws_within_groups():
    interval = import_module("measure").stratified_interval
    assert interval([[0.0] * 10, [1.0] * 10]) == (0.5, 0.5)
    low, high = interval([np.linspace(-1, 1, 40)])
    half = 1.96 * np.std(np.linspace(-1, 1, 40)) / np.sqrt(40)  # that of the mean, which varies a little less
    assert half < high < 1.5 * half and -1.5 * half < low < -half


def test_the_fastest_variant_counts():
    found = import_module("measure").fastest(
        "kernel", {("xla", 1): [1.0], ("kernel", 2): [4.0], ("kernel", 3): [2.0]}, 8
    )
    assert found == {"median": 4.0, "runs": [4.0], "variant": 3, "medians": {"2": 2.0, "3": 4.0}}


def test_sides_that_have_done_other_work_are_refused():
    check = import_module("measure").check_equal_work
    check({"ours": (1, 2), "theirs": (1, 2)})
    with pytest.raises(SystemExit, match="different work"):
        check({"ours": (1, 2), "theirs": (1, 3)})


def test_options_say_by_their_defaults_what_they_take(monkeypatch):
    measure = import_module("measure")
    line = "script.py speed --sizes 1 2 --rate 0.5 --quick --launch 1 --launch 2 3 --no-anneal"
    monkeypatch.setattr(sys, "argv", line.split())
    settings = {
        "sizes": [8],
        "rate": (float, "help"),
        "quick": False,
        "launch": [[int]],
        "anneal": True,
        "only": [str],
    }
    chosen = measure.options("doc", {"part": measure.one_of("speed", "learn")}, **settings, left=3)
    assert vars(chosen) == {
        **{"part": "speed", "sizes": [1, 2], "rate": 0.5, "quick": True, "launch": [[1], [2, 3]], "anneal": False},
        **{"only": None, "left": 3, "output": measure.RESULTS},
    }
    monkeypatch.setattr(sys, "argv", ["script.py", "other"])
    with pytest.raises(SystemExit):
        measure.options("doc", {"parts": measure.some_of(["speed"])})
