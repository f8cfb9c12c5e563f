"""Trainings that start together claim memory before they compile; what does not fit is refused in a sentence."""

import json
import os
import subprocess
import sys

import pytest

from rollmill.core.errors import DeviceMemoryError
from rollmill.gpus import claims as gpu_claims, memory as gpu_memory
from rollmill.gpus.claims import ROOM, ask_gpu_memory, claim_memory, release_claim, settle_claim
from rollmill.gpus.memory import GpuMemory
from wordings import raises

GIBIBYTE = 2**30
FREE = GpuMemory("GPU 0 (NVIDIA H100)", "GPU-0", 80 * GIBIBYTE, 79 * GIBIBYTE)
OTHER = FREE._replace(gpu="GPU 1 (NVIDIA H100)", uuid="GPU-1")
WHAT = "a training needs"


@pytest.fixture
def claims(monkeypatch, tmp_path):
    """Claims in a folder of the test's; `others` makes the claim so far that of another process that lives."""
    folder, kept = tmp_path / "claims", []
    monkeypatch.setattr(gpu_claims, "ask_gpu_memory", lambda: (FREE, OTHER))

    class Claims:
        path = folder

        def take(self, gibibytes, devices=1):
            claim_memory(int(gibibytes * GIBIBYTE), what=WHAT, devices=devices, folder=folder)

        def others(self, pid):
            own = gpu_claims._own
            (folder / f"{os.getpid()}.claim").rename(folder / f"{pid}.claim")
            kept.append(own.descriptor)
            gpu_claims._own = None

    yield Claims()
    release_claim()
    for descriptor in kept:
        os.close(descriptor)


def test_claims_of_others_count_as_memory_that_is_taken(claims):
    claims.take(40)
    claims.others(11)
    claims.take(30)
    claims.others(12)
    # 79 GiB are free; 40.5 and 30.5 are claimed, with half a GiB of room each.
    with raises("at-least-each-gpu-and", "a training needs", "8.0 GiB") as caught:
        claims.take(8)
    told = str(caught.value)
    assert (
        f"(process {os.getpid()}) is about to allocate 40.5 GiB" in told
        and "is about to allocate 30.5 GiB" in told
    )
    assert "hint: wait for these processes" in told and caught.value.exit_code == 3
    claims.take(7.5)
    assert json.loads((claims.path / f"{os.getpid()}.claim").read_text())["bytes"] == 7.5 * GIBIBYTE + ROOM


def test_a_claim_that_is_settled_is_counted_by_the_driver_alone(claims):
    claims.take(60)
    settle_claim()
    claims.others(11)
    (claim,) = gpu_claims.living_claims(claims.path)
    assert (claim.taken, claim.bytes) == (True, 60 * GIBIBYTE + ROOM)
    claims.take(70)


def test_a_new_claim_of_a_process_takes_the_place_of_its_own(claims):
    claims.take(60)
    claims.take(70)
    release_claim()
    claims.take(78.5)
    with pytest.raises(DeviceMemoryError):
        claims.take(78.6)


def test_only_the_gpus_of_a_claim_count(claims):
    claims.take(60)
    claims.others(11)
    with pytest.raises(DeviceMemoryError):
        claims.take(60, devices=2)


def test_claims_of_processes_that_ended_are_gone(claims):
    claims.take(60)
    claims.others(11)
    code = (
        "import sys; from pathlib import Path\n"
        "from rollmill.gpus import claims as gpu_claims, memory as gpu_memory\n"
        "memory = gpu_memory.GpuMemory('GPU 0', 'GPU-0', 80 << 30, 79 << 30)\n"
        "gpu_claims.ask_gpu_memory = lambda: (memory,)\n"
        "gpu_claims.claim_memory(10 << 30, what='it needs', devices=1, folder=Path(sys.argv[1]))\n"
        "print(len(list(Path(sys.argv[1]).glob('*.claim'))))\n"
        "gpu_claims.claim_memory(20 << 30, what='it needs', devices=1, folder=Path(sys.argv[1]))\n"
    )
    completed = subprocess.run([sys.executable, "-c", code, str(claims.path)], capture_output=True, text=True)
    # Its first claim fits beside the 60.5 GiB of a process that lives; its second one does not.
    assert completed.stdout == "2\n" and "it needs at least 20.0 GiB" in completed.stderr
    claims.take(18)
    assert len(list(claims.path.glob("*.claim"))) == 2


def test_a_training_that_the_driver_does_not_name_is_named_by_its_claim(claims, monkeypatch):
    claims.take(40)
    settle_claim()
    claims.others(11)
    (file,) = claims.path.glob("*.claim")
    file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 11'))
    monkeypatch.setattr(gpu_claims, "_default_folder", lambda: claims.path)
    monkeypatch.setattr(gpu_memory, "open_nvml", lambda: 1 / 0)
    monkeypatch.setattr(gpu_memory, "memory_by_smi", lambda: (FREE._replace(free=30 * GIBIBYTE), OTHER))
    first, second = ask_gpu_memory()
    told = str(first)
    # 50 GiB are held, of which the claim explains 40.5.
    assert "(process 11) took about 40.5 GiB, processes that the driver does not name here hold 9.5 GiB" in told
    assert second.holders == ()


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}', "[]", "x" * 2**17])
def test_damaged_claims_are_passed_over(claims, content):
    claims.take(60)
    claims.others(11)
    (claims.path / "11.claim").write_text(content)
    claims.take(70)


def test_a_folder_of_somebody_else_is_not_used(claims, tmp_path):
    claims.path.symlink_to(tmp_path)
    claims.take(70)
    assert not list(tmp_path.glob("*.claim"))


def test_nobody_tells_how_much_is_free(claims, monkeypatch):
    monkeypatch.setattr(gpu_claims, "ask_gpu_memory", lambda: ())
    claims.take(10_000)
    assert gpu_claims._own is None
