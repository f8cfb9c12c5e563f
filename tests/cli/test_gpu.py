"""`rollmill gpu`: by recorded answers of a driver."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.cli import gpu as command
from wordings import raises

INSTANCES = Path(__file__).parents[1] / "gpus"
sys.path.insert(0, str(INSTANCES))
from recording import Recorded  # noqa: E402 - beside the tests of instances


@pytest.fixture
def h200(monkeypatch):
    recorded = Recorded.read(INSTANCES / "recorded_h200.json")
    monkeypatch.setattr(command, "open_nvml", lambda: contextlib.nullcontext(recorded))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return recorded


def test_a_gpu_is_listed(h200, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # without the programs of the driver
    assert command.run(["--seconds", "0.01"]) == 0
    printed = capsys.readouterr().out
    assert "GPU 0: NVIDIA H200, " in printed and " of 140.4 GiB in use" in printed
    assert "several processes would share these GPUs through turns: the program nvidia-cuda-mps-control" in printed


def test_commands_of_a_partition_are_printed_and_not_run(h200, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *words, **_: pytest.fail(f"{words} was run"))
    assert command.run(["partition", "--slices", "7"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "# GPU 0 (NVIDIA H200) in 7 slices of 16 GiB and 16 multiprocessors",
        "nvidia-smi -i 0 -mig 1",
        "nvidia-smi mig -i 0 -cgi 19,19,19,19,19,19,19 -C",
        "# nothing was changed. Add --yes to run these commands.",
    ]


def test_confirmed_commands_are_run_until_one_fails(h200, monkeypatch):
    ran = []

    def fail_at_second(words, **_):
        ran.append(list(words[:2]))
        return subprocess.CompletedProcess(words, len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", fail_at_second)
    with raises("ended-with-exit-code-what", "nvidia-smi mig -i 0 -cgi", "1"):
        command.run(["partition", "--slices", "3", "--yes"])
    assert ran == [["nvidia-smi", "-i"], ["nvidia-smi", "mig"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], ("seconds-has-to-be-above", "0")),
        (["partition"], ("rollmill-gpu-partition-needs-slices",)),
        (["partition", "--slices", "9"], ("slices-has-to-be-from", "9", "7")),
        (
            ["partition", "--slices", "2", "--gpu", "3"],
            ("gpu-there-are-gpus", "3", "0"),
        ),
        (["divide"], ("has-no-use-for-hint", "rollmill gpu", "'divide'")),
    ],
)
def test_bad_input_is_refused(h200, words, message):
    with raises(*message):
        command.run(words)


def test_without_a_driver_the_reason_is_told():
    done = subprocess.run([sys.executable, "-m", "rollmill", "gpu"], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2 and done.stderr.startswith("rollmill: ") and "Traceback" not in done.stderr
