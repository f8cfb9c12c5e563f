"""Packages whose names are imported at their first use."""

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


def modules_of_names(package: ModuleType) -> dict[str, str]:
    """Returns the module of each name that a package imports under TYPE_CHECKING."""
    tree = ast.parse(Path(package.__file__ or "").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or "": str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_names_for_type_checkers_are_attributes_of_their_package(name):
    package = importlib.import_module(name)
    modules = modules_of_names(package)
    assert package.__all__ == [*modules]
    for each, module in modules.items():
        assert getattr(package, each) is getattr(importlib.import_module(module), each)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_module_does_not_hide_the_function_of_its_name():
    importlib.import_module("rollmill.algorithms.ppo")
    package = importlib.import_module("rollmill.algorithms")
    package.dqn = importlib.import_module("rollmill.algorithms.dqn")
    assert not isinstance(package.ppo, ModuleType) and package.ppo is rollmill.ppo
    assert not isinstance(package.dqn, ModuleType) and package.dqn is rollmill.dqn
