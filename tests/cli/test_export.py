"""`rollmill export` as a user runs it, and the example that plays without Rollmill."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollmill.cli.main import main

from .conftest import files_under

pytestmark = pytest.mark.skipif(find_spec("jax2onnx") is None, reason="export as ONNX is an extra")

ROOT = Path(__file__).parents[2]
TINY = ["--num-envs", "8", "--num-steps", "32", "--num-minibatches", "1", "--network.hidden-sizes", "16"]
EXAMPLE = (ROOT / "examples/play_onnx.py").read_text()
WITHOUT = """
import sys
sys.modules["jax"] = sys.modules["rollmill"] = None  # importing them raises
sys.argv = ["play_onnx.py", "policy.onnx", "3"]
exec(open({path!r}).read())
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment_variables):
    root = tmp_path_factory.mktemp("export")
    words = ["train", "ppo", "CartPole-v1", "--total-timesteps", "20480", "--no-tensorboard", "--run-dir", "run"]
    command = [sys.executable, "-m", "rollmill", *words, *TINY]
    subprocess.run(command, cwd=root, env=environment_variables, capture_output=True, check=True)
    return root / "run"


@pytest.mark.slow
def test_an_exported_policy_plays_without_rollmill(rollmill, trained, tmp_path):
    before = files_under(trained)
    done = rollmill("export", trained)
    assert done.returncode == 0, done.stderr
    assert "policy.onnx: ppo on CartPole-v1, iteration 80" in done.stdout
    assert "input   observation float32 [batch, 4]" in done.stdout
    assert "output  action int32 [batch]" in done.stdout
    assert "compared with the policy on 1,000 observations: its actions are equal" in done.stdout
    assert files_under(trained) == before
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.format(path=str(ROOT / "examples/play_onnx.py")))
    played = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert played.returncode == 0, played.stderr
    assert "ppo on CartPole-v1, iteration 80" in played.stdout
    assert float(re.search(r"mean return of 3 episodes: ([\d.]+)", played.stdout)[1]) > 50  # random actions: 22
    assert "import rollmill" not in EXAMPLE and "import jax" not in EXAMPLE


@pytest.mark.slow
def test_mistakes_exit_with_2_and_write_nothing(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.onnx").write_bytes(b"before")
    before = files_under(tmp_path)
    for words, sentence in (
        ([trained, "--format", "onxx"], "unknown format 'onxx'. Did you mean onnx"),
        ([trained, "--output", "there.onnx"], "there.onnx already exists. hint: --force"),
        ([trained, "--output", "none/x.onnx"], "none/x.onnx cannot be written: the folder none does not exist"),
        (["nowhere"], "nowhere does not exist"),
        ([tmp_path], "no run"),
        ([trained, "--checkpoint", "7", "--format", "stablehlo"], "7"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, words)])
        printed = capsys.readouterr()
        assert ended.value.code == 2 and sentence in printed.err, (words, printed.err)
        assert "Traceback" not in printed.err and printed.out == ""
        assert files_under(tmp_path) == before
    with pytest.raises(SystemExit) as ended:
        main(["export", str(trained), "--output", "there.onnx", "--force"])
    assert ended.value.code in (0, None)


@pytest.mark.slow
def test_a_missing_extra_is_named(rollmill, trained, tmp_path):
    (tmp_path / "jax2onnx.py").write_text("raise ImportError('not there')")
    done = rollmill("export", trained, env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"})
    assert done.returncode == 2
    assert re.search(
        r"the format onnx needs jax2onnx, which is not installed: pip install .*\[onnx\]", done.stderr
    )
    assert not (tmp_path / "policy.onnx").exists()
