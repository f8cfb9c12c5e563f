"""Files of tests can be collected together: outside of packages, pytest imports them by their base names."""

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_PYTEST = {"conftest.py"}


def importable_names():
    """Files by the name that they are imported by, where their folder is not a package."""
    found = defaultdict(list)
    for file in TESTS.rglob("*.py"):
        if file.name not in OF_PYTEST and not (file.parent / "__init__.py").exists():
            found[file.stem].append(str(file.relative_to(TESTS)))
    return found


def test_no_two_files_are_imported_by_one_name():
    names = importable_names()
    assert names["test_collection"] == ["core/test_collection.py"]
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def test_no_file_hides_a_package_of_tests():
    packages = {file.parent.name for file in TESTS.rglob("__init__.py")}
    assert "cli" in packages and not packages & importable_names().keys()
