"""Examples in docstrings of public functions: each has one, and its calls fit the functions."""

import ast
import inspect
import re

import pytest

import rollmill

OTHERS = ("register_algorithm", "register_network", "position")
"""Those that the pages on own algorithms and networks show in whole files."""
FUNCTIONS = [
    name for name in rollmill.__all__ if inspect.isfunction(getattr(rollmill, name)) and name not in OTHERS
]


def example_of(name):
    text = inspect.getdoc(getattr(rollmill, name)) or ""
    lines = text.partition("Examples:\n")[2].splitlines()
    code = [line.strip() for line in lines if line.strip().startswith((">>> ", "... "))]
    return "\n".join(line[4:] for line in code)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example_that_fits_it(name):
    called = [
        node
        for node in ast.walk(ast.parse(example_of(name)))
        if isinstance(node, ast.Call) and re.fullmatch(r"rollmill\.\w+", ast.unparse(node.func))
    ]
    assert f"rollmill.{name}" in [ast.unparse(node.func) for node in called]
    for node in called:
        function = getattr(rollmill, ast.unparse(node.func).removeprefix("rollmill."))
        inspect.signature(function).bind(*node.args, **{each.arg: each.value for each in node.keywords})
