"""The names that the glossary points at exist, and no word or class is there twice."""

import ast
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (?!word|---)([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
PLACES = [place for _, text in ROWS for place in re.findall(r"\(`([\w.]+)`\)", text)]


def test_each_word_has_one_entry():
    words = Counter(word.strip() for words, _ in ROWS for word in words.split(","))
    assert len(words) >= 40
    assert not [word for word, count in words.items() if count > 1]


@pytest.mark.parametrize("place", PLACES)
def test_what_an_entry_points_at_is_there(place):
    pytest.importorskip("llvmlite", reason="the backends of kernels are an extra")
    module, _, name = f"rollmill.{place}".rpartition(".")
    try:
        import_module(f"rollmill.{place}")
    except ModuleNotFoundError:
        assert hasattr(import_module(module), name)


def test_no_class_has_the_name_of_another():
    names = Counter(
        node.name
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
