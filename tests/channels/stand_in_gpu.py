"""Stands in for a GPU whose memory two processes share: its memory is memory of this process."""

import itertools
from ctypes import memmove

import numpy as np

from rollmill.channels.shm import gpu_slots, ring_reader, ring_writer
from rollmill.gpus import cuda_memory
from rollmill.gpus.cuda_memory import HANDLE_BYTES, NoPeerMemory


class StandInGpu:
    """Memory by handle. Arrays of JAX count as being on a GPU, and each end of a ring as another process."""

    def __init__(self, monkeypatch):
        self.memory, self.opened, self.closed = {}, 0, 0
        self.copied = 0  # messages that producers copied to the GPU's memory
        self.shares = self.opens = True
        for name in ("allocate", "handle_of", "open_handle", "close_handle", "copy"):
            monkeypatch.setattr(cuda_memory, name, getattr(self, name))
        monkeypatch.setattr(gpu_slots, "is_on_gpu", lambda leaf: not isinstance(leaf, np.ndarray))
        numbers = itertools.count(1)
        for end in (ring_reader, ring_writer):
            monkeypatch.setattr(end, "process_id", numbers.__next__)

    def allocate(self, gpu, num_bytes):
        if not self.shares:
            raise NoPeerMemory("cuMemAlloc_v2: out of memory (2)")
        memory = np.zeros(num_bytes, np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def handle_of(self, gpu, address):
        return address.to_bytes(HANDLE_BYTES, "little")

    def open_handle(self, gpu, handle):
        if not self.opens:
            raise NoPeerMemory("cuIpcOpenMemHandle_v2: invalid device context (201)")
        self.opened += 1
        address = int.from_bytes(handle, "little")
        assert address in self.memory
        return address

    def close_handle(self, gpu, address):
        self.closed += 1

    def copy(self, gpu, copies):
        self.copied += any(start <= copies[0][0] < start + len(each) for start, each in self.memory.items())
        for destination, source, num_bytes in copies:
            memmove(destination, source, num_bytes)
