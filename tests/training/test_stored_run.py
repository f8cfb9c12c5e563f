"""A run that an earlier version recorded can be used and resumed."""

import json
import shutil
from pathlib import Path

import numpy as np

import rollmill

STORED = Path(__file__).parent / "stored_run"


def test_a_run_of_an_earlier_version_is_loaded_and_goes_on(tmp_path):
    root = tmp_path / "run"
    shutil.copytree(STORED, root)
    assert rollmill.load(root).action(np.zeros(1, np.float32)) in (0, 1)
    run = rollmill.resume(root, quiet=True, changes={"total_timesteps": 64})
    assert (run.summary["status"], run.summary["iterations"]) == ("finished", 8)
    lines = (root / "metrics.jsonl").read_text().splitlines()
    assert lines[:4] == (STORED / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((root / "config.json").read_text())["graph"]["config"]["total_timesteps"] == 64
