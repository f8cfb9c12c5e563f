"""Slots of a ring in GPU memory, for messages between two processes of one host that compute on GPUs.

The producer allocates the memory and announces its handle in the ring's shared memory, and the consumer maps it
(CUDA's interprocess communication). A message is then copied once on the GPU at each end, and never passes
through the host. Until the consumer has mapped the memory, and if this is impossible, messages use shared
memory instead. Both ends decide this while they run:

    1. A consumer on a GPU writes the number of its process to its ledger.
    2. The producer, in another process, allocates memory at its first message and writes the handle to its
       section. This message, and all before step 3, use shared memory.
    3. When the consumer takes a message, it maps the memory and confirms this in its ledger.

The driver keeps the memory of a producer that has died for as long as the consumer has mapped it.
"""

import os
import struct
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rollmill.channels.layout import Layout
from rollmill.channels.transfers import is_on_gpu
from rollmill.gpus import cuda_memory
from rollmill.gpus.cuda_memory import HANDLE_BYTES

ANNOUNCED = struct.Struct(f"<q{HANDLE_BYTES}s")
"""A producer's announcement in shared memory: 1 once the handle is complete, and the handle of its GPU memory."""

SLOT_ALIGNMENT = 256
"""Alignment in bytes of slots, as the CUDA driver aligns its allocations."""


class ProducerSlots:
    """The producer's slots in GPU memory, which its process keeps until it ends."""

    def __init__(self, gpu: int, layout: Layout, capacity: int) -> None:
        """Allocates the slots on GPU number `gpu`. Raises `NoPeerMemory` if the driver cannot share memory."""
        self.gpu = gpu
        self._layout = layout
        self._address = cuda_memory.allocate(gpu, capacity * slot_bytes(layout))
        self.handle = cuda_memory.handle_of(gpu, self._address)

    def write(self, slot: int, leaves: Sequence[jax.Array]) -> None:
        """Copies the leaves of a message into a slot, and waits for the copies."""
        start = self._address + slot * slot_bytes(self._layout)
        jax.block_until_ready(leaves)
        pairs = zip(self._layout.leaves, leaves, strict=True)
        copies = [(start + to.offset, leaf.unsafe_buffer_pointer(), to.nbytes) for to, leaf in pairs if to.nbytes]
        cuda_memory.copy(self.gpu, copies)


class ConsumerSlots:
    """The slots of a producer in another process, mapped for reading."""

    def __init__(self, gpu: int, layout: Layout, handle: bytes) -> None:
        """Maps the slots for GPU number `gpu`. Raises `NoPeerMemory` if the driver cannot map them."""
        self._gpu = gpu
        self._layout = layout
        self._address = cuda_memory.open_handle(gpu, handle)
        self._new_arrays = jax.jit(lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves])
        weakref.finalize(self, cuda_memory.close_handle, gpu, self._address).atexit = False

    def copy(self, slot: int) -> list[jax.Array]:
        """Copies the leaves of the message in a slot, and waits for the copies.

        The copies are written into new arrays of JAX. Arrays that JAX made of the mapped memory would be bound to
        their device, unlike others, so that programs would be compiled once more for them.
        """
        start = self._address + slot * slot_bytes(self._layout)
        leaves = jax.block_until_ready(self._new_arrays())
        pairs = zip(leaves, self._layout.leaves, strict=True)
        copies = [(leaf.unsafe_buffer_pointer(), start + of.offset, of.nbytes) for leaf, of in pairs if of.nbytes]
        assert len({address for address, _, _ in copies}) == len(copies), "each array has its own memory"
        cuda_memory.copy(self._gpu, copies)
        return leaves


def gpu_leaves(layout: Layout, tree: PyTree) -> list[jax.Array] | None:
    """Returns the leaves of a message if all lie on one GPU and match the layout, otherwise None."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != layout.structure or not all(map(is_on_gpu, leaves)):
        return None
    kinds_of = lambda arrays: [(array.shape, array.dtype) for array in arrays]
    if kinds_of(leaves) != kinds_of(layout.leaves):
        return None
    return leaves if len({device for leaf in leaves for device in leaf.devices()}) == 1 else None


def gpu_of(leaf: jax.Array) -> int:
    """Returns the number of the GPU that holds an array, among those visible to this process."""
    (device,) = leaf.devices()
    return device.local_hardware_id or 0


def own_gpu() -> int | None:
    """Returns the number of the GPU of this process, or None on a CPU backend."""
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else device.local_hardware_id or 0


def process_id() -> int:
    """Returns the number of this process."""
    return os.getpid()


def slot_bytes(layout: Layout) -> int:
    """Returns the distance between two slots in bytes."""
    return -(-layout.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
