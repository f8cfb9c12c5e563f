"""Which GPU each worker gets, without a GPU: the driver's answers and MPS are stood in for."""

import contextlib

import pytest

from rollmill.core.errors import UsageError
from rollmill.gpus.devices import Gpu
from rollmill.gpus.sharing import SharedGpus
from rollmill.workers import worker_gpus as module
from rollmill.workers.worker_gpus import gpus_of_workers, nccl_version
from wordings import raises


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that are shared in turns, and a new NCCL."""
    gpus = [Gpu(index, f"GPU-{index}", "NVIDIA H200", 2**37, 0) for index in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(module, "open_nvml", lambda: contextlib.nullcontext(None))
    monkeypatch.setattr(module, "find_computing_gpus", lambda nvml: gpus)
    shared = lambda gpus, wanted: contextlib.nullcontext(SharedGpus(gpus, "turns", f"{wanted} was asked for", {}))
    monkeypatch.setattr(module, "shared_gpus", shared)
    monkeypatch.setattr(module, "nccl_version", lambda: (2, 31))


def devices(environments):
    return [each["CUDA_VISIBLE_DEVICES"] for each in environments]


def test_enough_gpus_are_one_each(two_gpus):
    for mesh in (False, True):
        with gpus_of_workers(2, "auto", mesh=mesh) as found:
            assert devices(found.environments) == ["0", "1"] and found.note == ""


def test_no_gpu_needs_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpus_of_workers(3, "auto", mesh=False) as found:
        assert found.environments == ()


def test_more_workers_share_the_gpus(two_gpus):
    with gpus_of_workers(5, "auto", mesh=False) as found:
        assert devices(found.environments) == ["GPU-0", "GPU-1", "GPU-0", "GPU-1", "GPU-0"]
        assert found.note == "5 workers share 2 GPUs by turns (auto was asked for)"
        parts = [float(each["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for each in found.environments]
        assert parts[0] == pytest.approx(2 / 3 * parts[1], rel=1e-3) and sum(parts[::2]) < 1
        assert "NCCL_MULTI_RANK_GPU_ENABLE" not in found.environments[0]


def test_a_mesh_of_workers_that_share_gpus_lets_nccl_join_them(two_gpus):
    with gpus_of_workers(4, "auto", mesh=True) as found:
        assert all(each["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" for each in found.environments)
        assert {each["NCCL_MAX_CTAS"] for each in found.environments} == {"4"}


@pytest.mark.parametrize(("version", "had"), [(None, "it is not installed"), ((2, 28), "there is 2.28")])
def test_a_mesh_with_an_old_nccl_takes_means_by_the_host(two_gpus, monkeypatch, version, had):
    monkeypatch.setattr(module, "nccl_version", lambda: version)
    with gpus_of_workers(4, "auto", mesh=True) as found:
        assert found.reduction == "host" and found.instances == 2
        assert found.note.endswith(
            "means are computed in host memory: NCCL 2.30 or newer is needed for several processes on one "
            f"GPU, but {had}"
        )
    with gpus_of_workers(4, "auto", mesh=True, reduction="host") as found:
        assert found.reduction == "host" and "NCCL" not in found.note
    message = f"reduction=flat with 4 processes on 2 GPUs: NCCL 2.30 .*, but {had}. hint: use reduction=host"
    with pytest.raises(UsageError, match=message), gpus_of_workers(4, "auto", mesh=True, reduction="flat"):
        pass
    with gpus_of_workers(4, "auto", mesh=False) as found:
        assert len(found.environments) == 4 and found.reduction == "auto"


def test_only_gpus_with_equally_many_workers_have_a_hierarchy(two_gpus):
    with gpus_of_workers(4, "auto", mesh=True, reduction="hierarchical") as found:
        assert found.reduction == "hierarchical" and found.instances == 2
    with gpus_of_workers(5, "auto", mesh=True, reduction="hierarchical") as found:
        assert found.reduction == "flat" and found.instances == 1
        assert "only several GPUs with equally many processes form a hierarchy" in found.note


def test_ways_are_timed_only_where_no_gpu_has_more_processes_than_others(two_gpus):
    for workers, reduction in ((2, "auto"), (3, "flat"), (4, "auto")):
        with gpus_of_workers(workers, "auto", mesh=True) as found:
            assert found.reduction == reduction


def test_a_reduction_for_workers_that_share_no_gpu_is_noted(two_gpus):
    with gpus_of_workers(2, "auto", mesh=True, reduction="host") as found:
        assert found.reduction == "auto" and found.note.startswith("reduction=host has no effect")


def test_a_one_shot_mean_needs_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for workers in (0, 2):
        with (
            raises("reduction-one-shot-reads-memory"),
            gpus_of_workers(workers, "auto", mesh=True, reduction="one-shot"),
        ):
            pass


def test_a_one_shot_mean_needs_a_gpu_for_each_process(two_gpus):
    with gpus_of_workers(2, "auto", mesh=True, reduction="one-shot") as found:
        assert found.reduction == "one-shot" and found.note == ""
    with (
        raises("reduction-one-shot-with-processes", "4", "2", "2"),
        gpus_of_workers(4, "auto", mesh=True, reduction="one-shot"),
    ):
        pass


def test_the_version_of_nccl_is_read_or_there_is_none():
    found = nccl_version()
    assert found is None or (2, 0) < found < (9, 0)
