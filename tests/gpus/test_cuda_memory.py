"""Calls of CUDA's driver, which a recorder stands in for."""

import ctypes

import pytest

from rollmill.gpus import cuda_memory
from rollmill.gpus.cuda_memory import (
    HANDLE_BYTES,
    NoPeerMemory,
    allocate,
    close_handle,
    copy,
    handle_of,
    let_reach,
    open_handle,
)
from wordings import raises


class Driver:
    """Answers as CUDA's driver does, with memory at fixed addresses."""

    def __init__(self, **codes):
        self.codes, self.calls, self.contexts = codes, [], 0

    def __getattr__(self, name):
        return lambda *arguments: self._called(name, arguments)

    def _called(self, name, arguments):
        self.calls.append(name)
        self.contexts += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
        if name in self.codes:
            return self.codes[name]
        match name:
            case "cuMemAlloc_v2":
                arguments[0]._obj.value = 0x7F00_0000_1000
            case "cuIpcGetMemHandle":
                arguments[0]._obj.bytes[:] = range(HANDLE_BYTES)
            case "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1].bytes) == bytes(range(HANDLE_BYTES))
                arguments[0]._obj.value = 0x7E00_0000_0000
            case "cuDeviceCanAccessPeer":
                arguments[0]._obj.value = self.codes.get("can", 1)
            case "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
        return 0


@pytest.fixture
def driver(monkeypatch):
    def start(**codes):
        found = Driver(**codes)
        monkeypatch.setattr(cuda_memory, "_driver", lambda: found)
        for cached in (cuda_memory._device, cuda_memory._primary, cuda_memory._stream):
            cached.cache_clear()
        return found

    yield start
    for cached in (cuda_memory._device, cuda_memory._primary, cuda_memory._stream):
        cached.cache_clear()


def test_memory_is_zeroed_before_it_is_shared_and_opened_elsewhere(driver):
    recorder = driver()
    address = allocate(0, 2**21)
    assert address == 0x7F00_0000_1000
    assert recorder.calls[-4:] == ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuCtxSynchronize", "cuCtxPopCurrent_v2"]
    handle = handle_of(0, address)
    assert handle == bytes(range(HANDLE_BYTES)), "zeros inside do not end it"
    assert open_handle(1, handle) == 0x7E00_0000_0000
    assert recorder.contexts == 0, "each call leaves JAX's current context as it was"


def test_memory_is_copied_on_one_stream_and_unmapped(driver):
    recorder = driver()
    copy(0, [(0x10, 0x20, 64), (0x30, 0x40, 8)])
    copy(0, [(0x10, 0x20, 64)])
    copies = ["cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuStreamSynchronize", "cuCtxPopCurrent_v2"]
    assert recorder.calls[recorder.calls.index("cuStreamCreate") + 1 :][:4] == copies
    assert recorder.calls.count("cuStreamCreate") == 1
    close_handle(0, 0x7E00_0000_0000)
    assert "cuIpcCloseMemHandle" in recorder.calls and recorder.contexts == 0


def test_what_cuda_refuses_is_said_with_its_name(driver):
    recorder = driver(cuMemAlloc_v2=2)
    with pytest.raises(NoPeerMemory, match=r"cuMemAlloc_v2: out of memory \(2\)"):
        allocate(0, 2**21)
    assert recorder.contexts == 0


def test_gpus_reach_each_other_once_or_again_or_not_at_all(driver):
    recorder = driver()
    let_reach(0, 1)
    assert "cuCtxEnablePeerAccess" in recorder.calls and recorder.contexts == 0
    recorder = driver()
    let_reach(0, 1)
    assert "cuCtxEnablePeerAccess" in recorder.calls and recorder.contexts == 0
    driver(cuCtxEnablePeerAccess=704)  # JAX has enabled it already
    let_reach(0, 1)
    driver(can=0)
    with raises("gpu-cannot-reach-memory-gpu", "0", "1"):
        let_reach(0, 1)


def test_without_a_driver_there_is_no_memory(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_memory._driver.cache_clear()
    with raises("there-is-no-cuda-driver", "libcuda.so.1"):
        cuda_memory._driver()
