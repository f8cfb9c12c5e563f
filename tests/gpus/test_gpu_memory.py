"""The memory of GPUs is asked before any is taken, and errors about it name who holds it; by recorded answers."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from rollmill.core.errors import DeviceLostError, DeviceMemoryError
from rollmill.envs import registry
from rollmill.gpus import device_errors, jax_settings, memory as gpu_memory, memory_limit as gpu_share
from rollmill.gpus.claims import ask_gpu_memory
from rollmill.gpus.memory import GpuMemory, Holder, memory_by_nvml, memory_by_smi, process_name
from rollmill.gpus.memory_limit import check_fraction, choose_fraction, memory_variables
from wordings import raises

GIBIBYTE = 2**30
MINE = os.getpid()
UNKNOWN_PID = 2**22 + 5
"""Above the largest of Linux."""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """The user has set none of JAX's variables, nor has another test."""
    for name in (gpu_share.PREALLOCATE, gpu_share.ALLOCATOR, *gpu_share.FRACTIONS):
        monkeypatch.delenv(name, raising=False)


class Driver:
    """NVML of a host with two GPUs, of 80 and 40 GiB, and processes on the first."""

    class NVMLError(Exception):
        """Any error."""

    NVML_DEVICE_MIG_ENABLE = 1
    memory = (
        SimpleNamespace(total=80 * GIBIBYTE, used=61 * GIBIBYTE, free=19 * GIBIBYTE),
        SimpleNamespace(total=40 * GIBIBYTE, used=0, free=40 * GIBIBYTE),
    )
    compute = (
        SimpleNamespace(pid=MINE, usedGpuMemory=20 * GIBIBYTE),
        SimpleNamespace(pid=UNKNOWN_PID, usedGpuMemory=40 * GIBIBYTE),
    )

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, device):
        return self.memory[device]

    def nvmlDeviceGetUUID(self, device):
        return f"GPU-{device}"

    def nvmlDeviceGetName(self, device):
        return "NVIDIA H100"

    def nvmlDeviceGetMigMode(self, device):
        raise self.NVMLError

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return () if device else self.compute

    def nvmlDeviceGetMPSComputeRunningProcesses(self, device):
        return () if device else self.compute[:1]  # listed twice, and not counted twice

    def nvmlSystemGetProcessName(self, pid):
        return "/opt/other/trainer" if pid == UNKNOWN_PID else ""


@pytest.fixture
def visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda words: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)


def test_processes_and_bytes_are_named(visible):
    first, second = memory_by_nvml(Driver())
    assert (first.gpu, first.total, first.free) == ("GPU 0 (NVIDIA H100)", 80 * GIBIBYTE, 19 * GIBIBYTE)
    assert [(holder.pid, holder.bytes) for holder in first.holders] == [
        (UNKNOWN_PID, 40 * GIBIBYTE),
        (MINE, 20 * GIBIBYTE),
    ]
    assert str(first) == (
        f"GPU 0 (NVIDIA H100) has 19.0 GiB of 80.0 GiB free; trainer (process {UNKNOWN_PID}) holds 40.0 GiB, this "
        "process holds 20.0 GiB, processes that the driver does not name here hold 1.0 GiB"
    )
    assert str(second).endswith("40.0 GiB of 40.0 GiB free; no process holds any of it")


def test_only_visible_gpus_are_asked(visible):
    visible("GPU-1")
    assert [memory.uuid for memory in memory_by_nvml(Driver())] == ["GPU-1"]


def test_a_driver_that_names_no_processes(visible):
    driver = Driver()
    driver.nvmlDeviceGetComputeRunningProcesses = lambda device: ()
    driver.compute = ()
    assert "processes that the driver does not name here hold 61.0 GiB" in str(memory_by_nvml(driver)[0])
    driver = Driver()
    driver.compute = (SimpleNamespace(pid=UNKNOWN_PID, usedGpuMemory=None),)
    told = str(memory_by_nvml(driver)[0])
    assert told.endswith(f"free; trainer (process {UNKNOWN_PID}) holds an unknown amount")


SMI = {
    gpu_memory.SMI_GPUS: "0, GPU-0, NVIDIA H100 80GB HBM3, 81559, 1024\n1, GPU-1, NVIDIA H100, 100, 90\nx\n",
    gpu_memory.SMI_PROCESSES: f"GPU-0, {UNKNOWN_PID}, 2048, /usr/bin/a, b\nGPU-0, 1, [N/A], init\nno process\n",
}


def test_nvidia_smi_where_nvml_is_missing(visible, monkeypatch):
    answer = lambda name, *query, **options: SimpleNamespace(returncode=0, stdout=SMI[query])
    monkeypatch.setattr(gpu_memory, "run_program", answer)
    first, second = memory_by_smi()
    assert (first.gpu, first.total, first.free) == ("GPU 0 (NVIDIA H100 80GB HBM3)", 81559 << 20, 1 << 30)
    assert [(holder.pid, holder.bytes) for holder in first.holders] == [(UNKNOWN_PID, 2 << 30), (1, None)]
    assert second.holders == () and second.free == 90 << 20
    visible("1")
    assert [memory.uuid for memory in memory_by_smi()] == ["GPU-1"]


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 20.0)])
def test_nobody_answers(visible, monkeypatch, error):
    def fail(*words, **options):
        raise error

    monkeypatch.setattr(gpu_memory, "run_program", fail)
    monkeypatch.setattr(gpu_memory, "open_nvml", lambda: fail())
    assert ask_gpu_memory() == ()


def test_names_of_processes_have_no_options(tmp_path):
    script = tmp_path / "train\x1b.py"
    script.write_text("import time; print(flush=True); time.sleep(60)")
    words = ["-u", str(script), "ppo", "CartPole-v1", "--token", "secret"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        name = process_name(process.pid)
        process.kill()
    assert name == "train?.py ppo CartPole-v1"
    assert process_name(UNKNOWN_PID, "/usr/bin/trainer") == "trainer"
    assert process_name(UNKNOWN_PID) == ""


FREE = GpuMemory("GPU 0 (NVIDIA H100)", "GPU-0", 80 * GIBIBYTE, 80 * GIBIBYTE)
HALF = FREE._replace(free=40 * GIBIBYTE, holders=(Holder(UNKNOWN_PID, "a.py", 40 * GIBIBYTE),))
LITTLE = FREE._replace(free=10 * GIBIBYTE)
FULL = FREE._replace(free=GIBIBYTE - 1, holders=(Holder(UNKNOWN_PID, "a.py", 79 * GIBIBYTE),))


@pytest.mark.parametrize(
    ("memory", "environment", "variables"),
    [
        # 0.92 of what is free: of all, of half, and of the fuller one of two GPUs.
        ([FREE], {}, {"PREALLOCATE": "false", "MEM_FRACTION": "0.9200"}),
        ([FREE, HALF], {}, {"PREALLOCATE": "false", "MEM_FRACTION": "0.4600"}),
        ([], {}, {"PREALLOCATE": "false"}),
        # The user's own choices stay as they are.
        ([HALF], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"MEM_FRACTION": "0.4600"}),
        ([HALF], {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, {"MEM_FRACTION": "0.4600"}),
        ([HALF], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, {}),
        ([HALF], {"XLA_CLIENT_MEM_FRACTION": "0.3"}, {}),
        ([HALF], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {}),
        ([FREE], {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {}),
    ],
)
def test_what_is_free_is_taken_as_it_is_needed(memory, environment, variables):
    expected = {f"XLA_PYTHON_CLIENT_{name}": value for name, value in variables.items()}
    assert memory_variables(memory, environment) == expected


def test_an_option_takes_its_share_at_once():
    assert memory_variables([HALF], {}, 0.25) == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"}
    with raises("takes-at-once-and-hint", "memory_fraction=0.6", "48.0 GiB", "GPU 0", "40.0 GiB of"):
        memory_variables([HALF], {}, 0.6)


@pytest.mark.parametrize(
    ("memory", "environment", "message"),
    [
        (
            FULL,
            {},
            rf"needs 1.0 GiB of GPU memory before it allocates .*; a.py \(process {UNKNOWN_PID}\) holds 79.0 GiB",
        ),
        (FULL, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}, r"needs 1.0 GiB of GPU memory before"),
        (
            HALF,
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"},
            r"XLA_PYTHON_CLIENT_MEM_FRACTION=0.75 allocates 60.0 GiB at once",
        ),
        (
            HALF,
            {"XLA_CLIENT_MEM_FRACTION": "0.75"},
            r"XLA_CLIENT_MEM_FRACTION=0.75 allocates 60.0 GiB .*0.46 would fit",
        ),
        (HALF, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, r"PREALLOCATE=true allocates 60.0 GiB at once.*a.py"),
    ],
)
def test_too_little_memory_is_refused_before_anything_starts(memory, environment, message):
    with pytest.raises(DeviceMemoryError, match=message):
        memory_variables([memory], environment)


def test_variables_hold_while_the_backend_starts_and_no_longer(monkeypatch):
    monkeypatch.setattr(gpu_share, "takes_gpus", lambda: True)
    monkeypatch.setattr(gpu_share, "backend_has_started", lambda: False)
    monkeypatch.setattr(gpu_share, "_memory", ())
    monkeypatch.setattr(gpu_share, "_as_needed", False)
    monkeypatch.setattr(gpu_share, "ask_gpu_memory", lambda: (HALF,))
    seen = []
    monkeypatch.setattr(jax, "default_backend", lambda: seen.append(dict(os.environ)))
    jax_settings.check_platform()
    (note,) = gpu_share.memory_notes()
    assert note.startswith("GPU 0 (NVIDIA H100) has 40.0 GiB of 80.0 GiB free; a.py (process")
    assert note.endswith("holds 40.0 GiB; free memory is allocated on demand")
    assert seen[0]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert seen[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.4600"
    assert not any(name.startswith("XLA_PYTHON_CLIENT") for name in os.environ)
    monkeypatch.setattr(gpu_share, "ask_gpu_memory", lambda: (FULL,))
    with raises("gpu-memory-is-taken", "process"):
        jax_settings.check_platform()
    monkeypatch.setattr(gpu_share, "backend_has_started", lambda: True)
    jax_settings.check_platform()  # it has its memory, and this process may be the one that holds it
    assert len(seen) == 2


def test_an_environment_whose_arrays_start_the_backend_leaves_memory_too(monkeypatch):
    seen = []

    def factory():
        seen.append({name: text for name, text in os.environ.items() if name.startswith("XLA_PYTHON")})
        return registry.make("CartPole-v1")

    monkeypatch.setitem(registry.ENVIRONMENTS, "Starting-v0", factory)
    monkeypatch.setattr(gpu_share, "takes_gpus", lambda: True)
    monkeypatch.setattr(gpu_share, "backend_has_started", lambda: bool(seen))
    monkeypatch.setattr(gpu_share, "_memory", ())
    monkeypatch.setattr(gpu_share, "_as_needed", False)
    monkeypatch.setattr(gpu_share, "ask_gpu_memory", lambda: (HALF,))
    registry.make("Starting-v0")
    assert seen == [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4600"}]


def test_a_backend_that_finds_no_memory_says_who_holds_it(monkeypatch):
    def fail():
        raise RuntimeError(
            "Unable to initialize backend 'cuda': INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
        )

    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: (FULL,))
    with pytest.raises(
        DeviceMemoryError, match=r"does not have enough memory \(Unable .*\) GPU 0 .* a.py .* hint: wait for these"
    ):
        jax_settings.check_platform()


MEMORY_ERRORS = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.",
    "INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "INTERNAL: solver_handle_pool.cc: operation gpusolverDnCreate(&handle) failed: cuSolver internal error",
    "INTERNAL: Failed to get configs for hlo: %gemm = custom-call",
    "INTERNAL: failed to create cublas handle: the resource allocation failed",
    "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
    "INTERNAL: CUDNN_STATUS_NOT_INITIALIZED",
]


@pytest.mark.parametrize("text", MEMORY_ERRORS)
def test_errors_for_want_of_memory_are_one_sentence(monkeypatch, text):
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: (FULL,))
    known = device_errors.known_device_error(jax.errors.JaxRuntimeError(text))
    assert isinstance(known, DeviceMemoryError) and known.exit_code == 3
    assert f"a.py (process {UNKNOWN_PID}) holds 79.0 GiB" in str(known) and "CUDA_VISIBLE_DEVICES" in str(known)
    assert "\n" not in str(known)


def test_libraries_that_fail_beside_free_memory_fail_for_another_reason(monkeypatch):
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: (HALF,))
    assert device_errors.known_device_error(jax.errors.JaxRuntimeError(MEMORY_ERRORS[2])) is None
    assert isinstance(
        device_errors.known_device_error(jax.errors.JaxRuntimeError(MEMORY_ERRORS[0])), DeviceMemoryError
    )


def test_a_lost_gpu_is_told_from_one_without_memory(monkeypatch):
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: ())
    text = "INTERNAL: CUDA error: Could not synchronize: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
    known = device_errors.known_device_error(jax.errors.JaxRuntimeError(text))
    assert isinstance(known, DeviceLostError) and known.exit_code == 4
    assert device_errors.known_device_error(jax.errors.JaxRuntimeError("INTERNAL: a shape is wrong")) is None
    assert device_errors.known_device_error(ValueError("RESOURCE_EXHAUSTED")) is None


def test_a_share_by_an_option_is_refused_where_it_has_no_effect(monkeypatch):
    monkeypatch.setattr(gpu_share, "_chosen", None)
    with raises("has-no-effect-jax-uses", "memory_fraction=0.3"):
        choose_fraction(0.3)
    monkeypatch.setattr(gpu_share, "takes_gpus", lambda: True)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with raises("contradicts-hint-leave-one-them", "memory_fraction=0.3", "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5"):
        choose_fraction(0.3)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setattr(gpu_share, "backend_has_started", lambda: True)
    with raises("comes-too-late-jax-has", "memory_fraction=0.3"):
        choose_fraction(0.3)
    monkeypatch.setattr(gpu_share, "backend_has_started", lambda: False)
    choose_fraction(0.3)
    assert gpu_share._chosen == 0.3
    check_fraction("memory_fraction=0.3", 0.3, [FREE])
