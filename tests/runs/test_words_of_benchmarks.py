"""Benchmarks find lines of trainings and sweeps by words. Words that no line has would count nothing, silently."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import rollmill

SOURCE = Path(rollmill.__file__).parent


def texts(package):
    """The strings of a package's modules, docstrings excepted."""
    for file in (SOURCE / package).rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                yield node.value


@pytest.mark.parametrize(
    ("benchmark", "constant", "packages"),
    [
        ("hosts", "SAID", ("workers", "processes")),
        ("chaos", "SAID", ("workers",)),
        ("shared_gpu", "SAID", ("sweeps",)),
    ],
)
def test_the_words_that_a_benchmark_looks_for_are_said(benchmark, constant, packages, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    words = getattr(import_module(benchmark), constant)
    said = "\n".join(text for package in packages for text in texts(package))
    assert [each for each in (words.values() if isinstance(words, dict) else words) if each not in said] == []
