"""Allocates and copies memory that several GPUs or processes share, through the CUDA driver.

GPUs are numbered among those visible to this process.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

HANDLE_BYTES = 64
PAGE_BYTES = 2 * 2**20
"""Memory is allocated in multiples of this many bytes, because CUDA shares whole pages with other processes."""
_LAZY_ENABLE_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704
_NON_BLOCKING = 1


class NoPeerMemory(Exception):
    """Error: GPUs cannot access each other's memory. The message gives the reason."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


def allocate(gpu: int, num_bytes: int) -> int:
    """Allocates at least `num_bytes` zeroed bytes on a GPU, in whole pages, and returns their address.

    Raises `NoPeerMemory` if a call of the CUDA driver fails.
    """
    address = ctypes.c_uint64()
    num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    with _context(gpu):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        _call("cuCtxSynchronize")
    return address.value


def handle_of(gpu: int, address: int) -> bytes:
    """Returns a handle with which other processes can open memory allocated by `allocate`.

    Raises `NoPeerMemory` if a call of the CUDA driver fails.
    """
    handle = _Handle()
    with _context(gpu):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.bytes)


def open_handle(gpu: int, handle: bytes) -> int:
    """Maps memory that another process has allocated, for kernels on one GPU, and returns its address.

    Raises `NoPeerMemory` if a call of the CUDA driver fails.
    """
    address = ctypes.c_uint64()
    passed = _Handle.from_buffer_copy(handle)
    with _context(gpu):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), passed, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(gpu: int, address: int) -> None:
    """Unmaps memory that `open_handle` has mapped. Raises `NoPeerMemory` if a call of the CUDA driver fails."""
    with _context(gpu):
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def copy(gpu: int, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copies memory on a GPU, and waits. `copies` has the addresses of destination and source, and bytes.

    Raises `NoPeerMemory` if a call of the CUDA driver fails.
    """
    with _context(gpu):
        stream = _stream(gpu)
        for destination, source, num_bytes in copies:
            addresses = ctypes.c_uint64(destination), ctypes.c_uint64(source)
            _call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), stream)
        _call("cuStreamSynchronize", stream)


def let_reach(gpu: int, other: int) -> None:
    """Lets kernels on one GPU read and write all memory that this process has allocated on another GPU.

    Raises `NoPeerMemory` if a call of the CUDA driver fails.
    """
    can = ctypes.c_int()
    _call("cuDeviceCanAccessPeer", ctypes.byref(can), _device(gpu), _device(other))
    if not can.value:
        raise NoPeerMemory(f"GPU {gpu} cannot reach the memory of GPU {other}")
    with _context(gpu):
        _call("cuCtxEnablePeerAccess", _primary(other), ctypes.c_uint(0), but=_PEER_ACCESS_ALREADY_ENABLED)


@contextmanager
def _context(gpu: int) -> Iterator[None]:
    """Calls inside are for this GPU, in the context that JAX uses as well."""
    _call("cuCtxPushCurrent_v2", _primary(gpu))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _stream(gpu: int) -> ctypes.c_void_p:
    """Makes a stream for copies on a GPU, in the current context."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    return stream


@cache
def _primary(gpu: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(gpu))
    return context


@cache
def _device(gpu: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(gpu))
    return device


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoPeerMemory(f"there is no CUDA driver: {error}") from error
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any, but: int = 0) -> None:
    """Calls a function of the driver, which may also answer with the code `but`."""
    driver = _driver()
    if (code := getattr(driver, name)(*arguments)) not in (0, but):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise NoPeerMemory(f"{name}: {(text.value or b'unknown').decode()} ({code})")
