"""`rollmill warm` stores all that a start of the same training needs."""

import subprocess
import sys

import pytest

from rollmill.cli import main

SMALL = "--num-envs 2 --num-steps 4 --num-minibatches 1 --update-epochs 1 --total-timesteps 8"
WORDS = ["ppo", "CartPole-v1", *SMALL.split(), "--network.hidden-sizes", "4"]


def files_in(folder):
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_start_after_warming_adds_nothing_to_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "cache"))

    def command(*words):
        subprocess.run([sys.executable, "-m", "rollmill", *words], check=True, timeout=300, cwd=tmp_path)
        return files_in(tmp_path / "cache")

    warmed = command("warm", *WORDS)
    assert {file.parent.name for file in warmed} >= {"programs", "digests"}
    assert not (tmp_path / "runs").exists()
    assert command("train", *WORDS, "--seed", "5", "--run-dir", "run", "--quiet") == warmed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run-dir", "run"], "--run-dir has no effect"),
        (["--search-plan"], "warm with --plan FILE"),
        (["--distribution", "single-learner-coarse"], "workers that compile their own programs"),
    ],
)
def test_what_cannot_be_warmed_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["warm", *WORDS, *words])
    assert end.value.code == 2 and message in capsys.readouterr().err
