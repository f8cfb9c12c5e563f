"""Packages whose names are imported at their first use: both lists of names in each agree."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import rollmill

SOURCE = Path(rollmill.__file__).parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(SOURCE.parent).parts)
    for path in SOURCE.rglob("__init__.py")
    if "lazy_names(" in path.read_text()
)


def names_for_type_checkers(package: ModuleType) -> dict[str, set[str]]:
    """Returns the names that a package imports under TYPE_CHECKING, by module."""
    tree = ast.parse(Path(package.__file__ or "").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {
        str(node.module): {alias.name for alias in node.names if alias.asname == alias.name} for node in imports
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_the_names_that_are_imported_at_their_first_use(name):
    package = importlib.import_module(name)
    by_module = {module: set(names.split()) for module, names in package._MODULES.items()}
    assert names_for_type_checkers(package) == by_module
    assert set(package.__all__) == set().union(*by_module.values())


@pytest.mark.parametrize("name", PACKAGES)
def test_every_listed_name_is_an_attribute_of_its_package(name):
    package = importlib.import_module(name)
    for each in package.__all__:
        defined = next(module for module, names in package._MODULES.items() if each in names.split())
        assert getattr(package, each) is getattr(importlib.import_module(defined), each)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_module_does_not_hide_the_function_of_its_name():
    importlib.import_module("rollmill.algorithms.ppo")
    package = importlib.import_module("rollmill.algorithms")
    package.dqn = importlib.import_module("rollmill.algorithms.dqn")
    assert not isinstance(package.ppo, ModuleType) and package.ppo is rollmill.ppo
    assert not isinstance(package.dqn, ModuleType) and package.dqn is rollmill.dqn
