"""Modules that are given as files: `--import walk.py`."""

import importlib
import os
import sys
from pathlib import Path

import pytest

import rollmill
from rollmill.cli.config_file import read_config_file
from rollmill.cli.listing import List
from rollmill.cli.parsing import parse
from rollmill.core.errors import UsageError
from rollmill.core.imports import files_of_modules, find_recorded_module, function_of_file, module_of_file
from rollmill.core.options import options_of
from rollmill.core.shell import command
from rollmill.planning.placement import PlacementOptions
from rollmill.policies.rules import find_rule, names_rule
from rollmill.runs.specification import import_modules
from wordings import raises


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for file in ("parts_at_top.py", "sub/parts_below.py", "parted/__init__.py", "parted/inner.py"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(f"WHERE = {file!r}")
    yield tmp_path
    for name in ("parts_at_top", "parts_below", "parted", "parted.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("file", "module", "first"),
    [
        ("parts_at_top.py", "parts_at_top", "."),
        ("./sub/parts_below.py", "parts_below", "sub"),
        ("parted/__init__.py", "parted", "."),
        ("parted/inner.py", "parted.inner", "."),
    ],
)
def test_a_file_is_imported_by_its_name_from_its_folder(file, module, first):
    imports = parse(List, ["--import", file], prog="rollmill list").imports
    assert imports == (module,) and sys.path[0] == os.path.realpath(first)
    import_modules(imports)
    assert os.path.normpath(file) == sys.modules[module].WHERE
    assert command("list", imports=imports) == f"rollmill list --import {os.path.normpath(file)}"


def test_a_name_is_no_file_and_adds_no_folder():
    before = list(sys.path)
    assert parse(List, ["--import", "parts_at_top"], prog="rollmill list").imports == ("parts_at_top",)
    assert sys.path == before


def test_a_folder_is_added_once():
    module_of_file("parts_at_top.py")
    module_of_file("parted/inner.py")
    assert sys.path.count(os.path.realpath(".")) == 1


def test_an_option_file_names_files_and_the_file_of_a_run_does_not():
    Path("own.toml").write_text('import = ["sub/parts_below.py"]')
    Path("config.json").write_text('{"graph": {}, "options": {}, "imports": ["parts_at_top.py"]}')
    options = options_of(List)
    named = read_config_file(Path("own.toml")).values(options)
    assert named == {"import": ("parts_below",)} and sys.path[0] == os.path.realpath("sub")
    before = list(sys.path)
    of_run = read_config_file(Path("config.json")).values(options, strict=False)
    assert of_run["import"] == ("parts_at_top.py",) and sys.path == before


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.py", "nowhere.py cannot be imported, because there is no such file"),
        ("random.py", "already has a module 'random', of its standard library. hint: rename the file"),
        ("msgspec.py", "already has a module 'msgspec', at .*msgspec"),
        ("walk.v2.py", "its name contains a dot. hint: rename the file, for example to walk_v2.py"),
    ],
)
def test_a_file_that_python_could_not_import_is_refused(file, message):
    if file != "nowhere.py":
        Path(file).write_text("raise SystemExit('was imported')")
    before = list(sys.path)
    with pytest.raises(UsageError, match=message):
        module_of_file(file)
    assert sys.path == before


def test_functions_of_files(monkeypatch):
    Path("sub/own_rules.py").write_text(
        "def stay(key, observation, legal_actions):\n    return 1\n\n\ndef mine(counts):\n    return counts\n"
    )
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    assert names_rule("sub/own_rules.py:stay") and not names_rule("sub/own_rules.py")
    assert find_rule("sub/own_rules.py:stay", rollmill.make("CartPole-v1"))(None, None, None) == 1
    placed = parse(PlacementOptions, ["--distribution", "sub/own_rules.py:mine"], prog="rollmill train")
    assert placed.distribution == "own_rules:mine" and function_of_file("gpu-only") == "gpu-only"


def test_a_module_in_the_working_directory_is_to_be_named_by_its_file():
    with pytest.raises(
        UsageError, match=r"does not search by default. Name the file with --import parts_at_top\.py\."
    ):
        import_modules(["parts_at_top"])
    with pytest.raises(UsageError, match=r"with PYTHONPATH=\., as in `PYTHONPATH=\. rollmill"):
        import_modules(["parted"])


def test_a_recorded_file_is_found_by_the_folder_of_its_package(monkeypatch):
    file = os.path.realpath("parted/inner.py")
    find_recorded_module("parted.inner", file, where=Path("run"), named=False)
    assert sys.path[0] == os.path.realpath(".")
    import_modules(["parted.inner"])
    assert files_of_modules(["parted.inner", "json", "nowhere"]) == {"parted.inner": file}
    Path("moved").mkdir()
    Path("parted").rename("moved/parted")
    find_recorded_module("parted.inner", file, where=Path("run"), named=False)  # it is imported already
    monkeypatch.setattr(sys, "path", sys.path[1:])
    for name in ("parted", "parted.inner"):
        del sys.modules[name]
    importlib.invalidate_caches()
    with raises("imported-from-does-not-exist", "run", file, "parted.inner", "DIRECTORY/parted/inner.py"):
        find_recorded_module("parted.inner", file, where=Path("run"), named=False)


def test_another_module_of_the_recorded_name_is_not_taken_for_it(monkeypatch):
    Path("copy").mkdir()
    recorded, other = os.path.realpath("parts_at_top.py"), Path("copy/parts_at_top.py")
    monkeypatch.syspath_prepend(os.path.realpath("copy"))
    other.write_text(Path(recorded).read_text())
    find_recorded_module("parts_at_top", recorded, where=Path("run"), named=False)  # a copy is the same
    other.write_text("WHERE = 'elsewhere'")
    with raises("imported-from-but-python-finds", "copy/parts_at_top.py", "--import parts_at_top"):
        find_recorded_module("parts_at_top", recorded, where=Path("run"), named=False)
    find_recorded_module("parts_at_top", recorded, where=Path("run"), named=True)
    assert sys.path[0] == os.path.realpath("copy")
