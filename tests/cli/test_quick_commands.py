"""Commands that only print text or read files do not import JAX, which takes most of a second."""

import subprocess
import sys
from pathlib import Path

import pytest

STORED_RUN = Path(__file__).parents[1] / "training" / "stored_run"
HEAVY = {"jax", "equinox", "optax"}


@pytest.mark.parametrize("words", [["--help"], ["runs", "--help"], ["runs", str(STORED_RUN)]])
def test_a_command_that_computes_nothing_does_not_import_jax(words, environment_variables):
    command = [sys.executable, "-X", "importtime", "-m", "rollmill", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_variables, timeout=120)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "rollmill.cli.main" in imported
    assert not imported & HEAVY
