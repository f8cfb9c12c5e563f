"""The notebook: its cells run in order, and it is kept without outputs."""

import json
import os
import subprocess
import sys

import pytest

from manual.snippets import ROOT

NOTEBOOK = json.loads((ROOT / "examples/tour.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
OPTIMISED = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}


def test_no_outputs_are_kept():
    assert len(CODE) >= 8
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path):
    """A cell whose last line is an expression shows it; as a program, it computes it."""
    cells = ["".join(cell["source"]) for cell in CODE]
    checks = "assert longer.summary['env_steps'] > run.summary['env_steps'] and len(actions) == 5"
    learned = "assert run.summary['final_return'] > lines[0]['episode/return']"
    (tmp_path / "tour.py").write_text("\n\n".join([*cells, checks, learned]))
    environment = OPTIMISED | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "tour.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed all checks" in done.stdout
