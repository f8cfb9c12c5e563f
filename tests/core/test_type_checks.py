"""Tests check the types of arguments and results at run time, unless ROLLMILL_TYPE_CHECKS=0."""

import os
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from rollmill.algorithms.returns import decaying_sum
from rollmill.core.text import format_count

checked = pytest.mark.skipif(os.environ.get("ROLLMILL_TYPE_CHECKS") == "0", reason="checks are off")

ALL_AT_ONCE = """
import importlib, pkgutil
from jaxtyping import install_import_hook
install_import_hook("rollmill", "beartype.beartype")
import rollmill
count = 0
for module in pkgutil.walk_packages(rollmill.__path__, "rollmill."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
            count += 1
        except ModuleNotFoundError as missing:
            assert not missing.name.startswith("rollmill"), missing
print(count)
"""


@checked
def test_wrong_types_are_refused_at_every_call():
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="parameter 'one'"):
            format_count(1, one=2)  # pyright: ignore[reportArgumentType]
        assert format_count(1, "trial") == "1 trial"


@checked
def test_arguments_of_one_shape_must_agree():
    with pytest.raises(TypeCheckError, match="parameter 'decay'"):
        decaying_sum(jnp.ones(3), jnp.ones(2))
    with pytest.raises(TypeCheckError, match="parameter 'term'"):
        decaying_sum(jnp.ones(3, jnp.int32), jnp.ones(3))


@pytest.mark.slow
def test_annotations_of_functions_that_are_never_called_can_be_checked():
    done = subprocess.run([sys.executable, "-c", ALL_AT_ONCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500
