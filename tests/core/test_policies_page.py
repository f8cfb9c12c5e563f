"""The page "Policies for use", as it stands: its code is one program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/policies.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path):
    for package in ("jax2onnx", "onnxruntime"):
        pytest.importorskip(package, reason="export as ONNX is an extra")
    assert len(BLOCKS) >= 8
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(BLOCKS))
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert {"policy.onnx", "policy.stablehlo", "policy.stablehlo.json"} <= {p.name for p in tmp_path.iterdir()}


def test_the_sentence_on_the_page_is_the_one_that_is_raised():
    import numpy as np

    import rollmill
    from rollmill.core.spaces import struct
    from rollmill.policies.policy_arguments import as_batch

    with pytest.raises(rollmill.RollmillError) as caught:
        as_batch("the observation", struct(rollmill.make("CartPole-v1").observation_space), np.zeros(3))
    assert f"`{caught.value}`" in PAGE
