"""The notebook: its cells run in order, and it is kept with all outputs of `scripts/notebook.py` or with none."""

import json
import os
import subprocess
import sys

import pytest

from manual.snippets import ROOT

PATH = ROOT / "examples/tour.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
OPTIMISED = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}


def test_the_outputs_are_those_of_one_run_or_absent():
    assert len(CODE) >= 8 and PATH.stat().st_size < 150_000
    counts = [cell["execution_count"] for cell in CODE]
    if not any(cell["outputs"] for cell in CODE):
        assert set(counts) == {None}
        return
    assert counts == list(range(1, len(CODE) + 1))
    text = json.dumps([cell["outputs"] for cell in CODE])
    assert text.count("image/png") == 2 and "Traceback" not in text and "/tmp" not in text
    assert CODE[0]["outputs"][0]["data"]["text/plain"] == ["500.0"]


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path):
    """A cell whose last line is an expression shows it; as a program, it computes it."""
    pytest.importorskip("matplotlib", reason="the notebook draws curves")
    cells = ["".join(cell["source"]) for cell in CODE]
    checks = "assert longer.summary['env_steps'] > run.summary['env_steps']"
    checks += "\nassert len(actions) == 5 and frames.shape[2:] == (240, 3)"
    learned = "assert run.summary['evaluation_return'] > 475"
    (tmp_path / "tour.py").write_text("\n\n".join([*cells, checks, learned]))
    environment = OPTIMISED | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "tour.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed all checks" in done.stdout
