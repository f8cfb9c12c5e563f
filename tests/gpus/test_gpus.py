"""GPUs, their slices and their division into instances, by recorded answers of a driver."""

import contextlib
from pathlib import Path

import pytest
from recording import Recorded

from rollmill.core.machine import visible_gpus
from rollmill.gpus import machine_parts as parts_module, sharing as sharing_module
from rollmill.gpus.devices import Gpu, Slice, find_computing_gpus, find_gpus, read_gpus
from rollmill.gpus.machine_parts import divide_machine
from rollmill.gpus.mig import mig_commands, mig_layout
from rollmill.gpus.mps import MpsDaemon
from rollmill.gpus.sharing import choose_sharing, divide_gpus, part_of
from wordings import raises

GIBIBYTE = 2**30


@pytest.fixture
def h200():
    """Recorded on a machine with one H200, MIG off."""
    return Recorded.read(Path(__file__).parent / "recorded_h200.json")


@pytest.fixture
def sliced(h200):
    """The same with MIG on and two slices, as NVML's documentation describes the answers."""
    gpu = "nvmlDeviceGetHandleByIndex(0)"
    answers = {f"nvmlDeviceGetMigMode({gpu})": [1, 1], f"nvmlDeviceGetMaxMigDeviceCount({gpu})": 7}
    for index in (0, 3):
        part = f"slice {index}"
        answers |= {
            f"nvmlDeviceGetMigDeviceHandleByIndex({gpu}, {index})": part,
            f"nvmlDeviceGetUUID({part})": f"MIG-{index}",
            f"nvmlDeviceGetAttributes({part})": {"memorySizeMB": 16384, "multiprocessorCount": 16},
        }
    return Recorded(h200._answers | answers, {"NVML_DEVICE_MIG_ENABLE": 1, "NVML_GPU_INSTANCE_PROFILE_COUNT": 18})


def gpu_of(index, **changed):
    return Gpu(index, f"GPU-{index}", "NVIDIA H200", 140 * GIBIBYTE, 0)._replace(**changed)


def test_a_recorded_h200(h200):
    (gpu,) = read_gpus(h200)
    assert gpu.name == "NVIDIA H200" and gpu.memory_bytes == 150754820096
    assert gpu.uuid.startswith("GPU-") and not gpu.mig and gpu.slices == ()


def test_slices_are_found(sliced):
    (gpu,) = read_gpus(sliced)
    assert gpu.mig and gpu.slices == (Slice("MIG-0", 16 * GIBIBYTE, 16), Slice("MIG-3", 16 * GIBIBYTE, 16))


def test_visible_gpus_are_chosen_as_cuda_does(monkeypatch):
    gpus = (gpu_of(0), gpu_of(1), gpu_of(2, slices=(Slice("MIG-a", 1, 1),)))
    monkeypatch.setattr("rollmill.gpus.devices.read_gpus", lambda nvml: gpus)
    indices = lambda visible: [gpu.index for gpu in find_gpus(None, visible=visible)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.index for gpu in find_gpus(None)] == [0, 1, 2]
    assert indices("2,0") == [2, 0] and indices("GPU-1") == [1] and indices("MIG-a") == [2]
    assert indices("1,-1,0") == [1]  # the list ends at the first that is none
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in find_gpus(None)] == [1]
    with raises("there-is-no-gpu-to", "in CUDA_VISIBLE_DEVICES=7"):
        find_gpus(None, visible="7")


def test_only_slices_that_are_visible_are_used(monkeypatch):
    slices = tuple(Slice(f"MIG-{letter}", 1, 1) for letter in "abc")
    monkeypatch.setattr("rollmill.gpus.devices.read_gpus", lambda nvml: (gpu_of(0, slices=slices),))
    visible = lambda words: [part.uuid for gpu in find_gpus(None, visible=words) for part in gpu.slices]
    assert visible("MIG-b") == ["MIG-b"] and visible("MIG-c,MIG-a") == ["MIG-c", "MIG-a"]
    assert visible("0") == visible("GPU-0") == ["MIG-a", "MIG-b", "MIG-c"]


def test_gpus_without_slices_run_no_programs_where_mig_is_on(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = [gpu_of(0, mig=True), gpu_of(1)]
    monkeypatch.setattr("rollmill.gpus.devices.read_gpus", lambda nvml: tuple(gpus))
    assert [gpu.index for gpu in find_computing_gpus(None)] == [1]
    gpus.pop()
    with raises("gpu-has-mig-on-and", "0"):
        find_computing_gpus(None)


@pytest.mark.parametrize(("slices", "profile", "memory"), [(7, 19, 16), (3, 14, 32.5), (2, 9, None), (1, 0, None)])
def test_layouts_take_the_largest_slices(h200, slices, profile, memory):
    (gpu,) = read_gpus(h200)
    layout = mig_layout(h200, gpu, slices)
    assert (layout.profile, layout.slices) == (profile, slices)
    assert memory is None or layout.memory_bytes == memory * GIBIBYTE
    assert mig_commands(layout) == [
        "nvidia-smi -i 0 -mig 1",
        f"nvidia-smi mig -i 0 -cgi {','.join([str(profile)] * slices)} -C",
    ]


def test_slices_that_are_there_are_removed_first(sliced):
    (gpu,) = read_gpus(sliced)
    assert mig_commands(mig_layout(sliced, gpu, 7)) == [
        "nvidia-smi mig -i 0 -dci",
        "nvidia-smi mig -i 0 -dgi",
        "nvidia-smi mig -i 0 -cgi 19,19,19,19,19,19,19 -C",
    ]


@pytest.mark.parametrize("slices", [0, 8])
def test_impossible_numbers_of_slices_are_refused(h200, slices):
    with raises("slices-has-to-be-from", slices, "7"):
        mig_layout(h200, read_gpus(h200)[0], slices)


def test_a_gpu_without_mig_is_refused():
    without = Recorded(
        {"nvmlDeviceGetHandleByIndex(0)": "gpu"},
        {"NVML_GPU_INSTANCE_PROFILE_COUNT": 18, "NVML_DEVICE_MIG_ENABLE": 1},
    )
    with raises("gpu-cannot-be-divided-into", "7"):
        mig_layout(without, gpu_of(0), 7)


def test_sharing_is_chosen_by_what_there_is(monkeypatch):
    plain, sliced = [gpu_of(0)], [gpu_of(0, mig=True, slices=(Slice("MIG-0", GIBIBYTE, 16),))]
    monkeypatch.setattr(sharing_module, "mps_obstacle", lambda: None)
    assert choose_sharing(plain, "auto")[0] == "mps"
    assert choose_sharing(sliced, "auto")[0] == "mig"
    assert choose_sharing(plain, "turns") == ("turns", "as asked")
    with raises("gpu-sharing-mig-no-gpu"):
        choose_sharing(plain, "mig")
    monkeypatch.setattr(sharing_module, "mps_obstacle", lambda: "there is no program")
    assert choose_sharing(plain, "auto") == ("turns", "there is no program")
    with raises("gpu-sharing-mps-hint-gpu", "there is no program"):
        choose_sharing(plain, "mps")


def test_instances_divide_memory_and_gpus_in_turns(monkeypatch):
    for name in ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    gpus = [gpu_of(0), gpu_of(1, used_bytes=70 * GIBIBYTE)]
    daemons = {gpu.uuid: MpsDaemon({"CUDA_MPS_PIPE_DIRECTORY": f"/{gpu.uuid}"}, True, lock=9) for gpu in gpus}
    instances = divide_gpus(gpus, 6, way="mps", daemons=daemons, share=0.25)
    assert [instance.gpu.index for instance in instances] == [0, 1] * 3
    first, second = instances[:2]
    assert first.memory_bytes == pytest.approx(2 * second.memory_bytes) and 3 * first.memory_fraction < 1
    assert first.descriptors == (9,)
    assert first.environment() == {
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{first.memory_fraction:.4f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_MPS_PIPE_DIRECTORY": "/GPU-0",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in first.environment()  # the user's share stays
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.3")  # JAX's new name; with both it does not start
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in first.environment()
    with raises("processes-on-gpus-are-more", "200", "2"):
        divide_gpus(gpus, 200, way="mps", daemons=daemons)


@pytest.mark.parametrize(
    ("free", "processes", "part"),
    [(80, 1, 73.6), (80, 12, 80 / 12 - 0.625), (80, 20, 3.375), (8, 8, 0.375), (4, 8, 0.125)],
)
def test_each_process_has_room_for_its_handles_beside_its_part(free, processes, part):
    # 0.92 of an equal share, but at most that less 0.625 GiB, and at least a quarter.
    assert part_of(free * GIBIBYTE, processes) == pytest.approx(part * GIBIBYTE)


def test_a_gpu_whose_memory_is_in_use_gets_fewer_instances():
    gpus = [gpu_of(0), gpu_of(1)]
    limits = {"GPU-0": 3, "GPU-1": 1}
    instances = divide_gpus(gpus, 4, way="turns", daemons={}, limits=limits)
    assert [instance.gpu.index for instance in instances] == [0, 1, 0, 0]


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with GPUs, JAX's plugin for them, and a driver that answers; its GPUs, to be changed."""
    gpus = [gpu_of(0), gpu_of(1, used_bytes=137 * GIBIBYTE)]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(parts_module, "driver_is_there", lambda: True)
    monkeypatch.setattr(parts_module, "jax_has_cuda", lambda: True)
    monkeypatch.setattr(parts_module, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(parts_module, "open_nvml", lambda: contextlib.nullcontext(None))
    monkeypatch.setattr(parts_module, "usable_cores", lambda: 64)
    monkeypatch.setattr("rollmill.gpus.devices.read_gpus", lambda nvml: tuple(gpus))
    monkeypatch.setattr(sharing_module, "mps_obstacle", lambda: None)
    daemon = lambda uuid: contextlib.nullcontext(MpsDaemon({}, True, lock=None))
    monkeypatch.setattr(sharing_module, "shared_mps", daemon)
    return gpus


def devices_of(sharing="auto", wanted=None, enough=None):
    with divide_machine(wanted, 1000, sharing, enough=enough) as parts:
        return [part.environment.get("CUDA_VISIBLE_DEVICES") for part in parts.each], parts.least


def test_a_machine_is_divided_by_the_memory_of_its_gpus(driver):
    devices, least = devices_of()
    assert (devices.count("GPU-0"), devices.count("GPU-1"), least) == (35, 1, 2)
    driver[:] = [gpu_of(0, memory_bytes=300 * GIBIBYTE)]
    assert devices_of()[0].count("GPU-0") == 48, "the MPS limit"
    assert len(devices_of(wanted=40)[0]) == 40
    assert (len(devices_of(enough=3)[0]), len(devices_of(wanted=8, enough=3)[0])) == (3, 8)
    driver[:] = [gpu_of(0, mig=True, slices=tuple(Slice(f"MIG-{n}", GIBIBYTE, 16) for n in range(7)))]
    assert devices_of() == ([f"MIG-{n}" for n in range(7)], 7)


def test_programs_that_are_alone_on_their_gpus_need_no_daemon(driver, monkeypatch):
    monkeypatch.setattr(sharing_module, "shared_mps", None)  # not called
    assert devices_of(enough=1) == (["GPU-0", "GPU-1"], 2)
    del driver[1]
    assert devices_of(enough=1) == ([None], 1)


@pytest.mark.parametrize("platforms", ["cpu", "cpu,cuda", "tpu"])
def test_gpus_that_jax_does_not_use_are_not_divided(driver, monkeypatch, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert set(devices_of(wanted=3)[0]) == {None}
    with raises("gpu-sharing-has-no-effect", "turns"):
        devices_of("turns")


@pytest.mark.parametrize("platforms", ["", "cuda", "gpu", "cuda,cpu", " cuda"])
def test_gpus_that_jax_uses_are_divided(driver, monkeypatch, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert set(devices_of(wanted=3)[0]) == {"GPU-0", "GPU-1"}


@pytest.mark.parametrize("missing", ["jax_has_cuda", "visible_gpus"])
def test_without_gpus_that_jax_could_use_there_are_cores(driver, monkeypatch, missing):
    monkeypatch.setattr(parts_module, missing, lambda: False)
    assert set(devices_of(wanted=3)[0]) == {None}
    assert set(devices_of("turns", wanted=2)[0]) == {"GPU-0", "GPU-1"}, "the user says that GPUs are shared"


def test_hidden_gpus_are_not_visible(monkeypatch):
    for hidden in ("", "-1", " -1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0,-1,2")
    assert visible_gpus() == ["1", "0"]


def test_instances_take_slices_in_turns():
    gpu = gpu_of(0, mig=True, slices=(Slice("MIG-0", 16 * GIBIBYTE, 16), Slice("MIG-3", 16 * GIBIBYTE, 16)))
    instances = divide_gpus([gpu], 3, way="mig", daemons={})
    assert [instance.device for instance in instances] == ["MIG-0", "MIG-3", "MIG-0"]
    assert instances[1].memory_fraction == pytest.approx(2 * instances[0].memory_fraction)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in instances[0].environment()
