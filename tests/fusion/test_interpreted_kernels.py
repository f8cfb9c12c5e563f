"""Gradient kernels, computed by Triton's interpreter where there is no GPU, have the sums of the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")

SCRIPT = Path(__file__).parent / "interpreted.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("algorithm", "environment", "tile"),
    [
        ("ppo", "CartPole-v1", 0),
        ("ippo", "TagGridWorld-Small-v0", 0),
        ("ppo", "CartPole-v1", 32),
    ],
)
def test_a_kernel_computes_what_the_reference_does(algorithm, environment, tile, tmp_path):
    command = [sys.executable, str(SCRIPT), algorithm, environment, str(tmp_path), str(tile)]
    own = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5
