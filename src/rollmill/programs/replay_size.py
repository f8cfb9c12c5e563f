"""Computes the size of a replay memory, and checks before a run that it fits."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollmill.core.errors import UsageError
from rollmill.core.machine import device_memory, memory_bytes
from rollmill.core.text import format_bytes
from rollmill.dataflow import Graph, empty_experience

SHARE = 0.8
"""Share of a device's memory that the replay memory may take. The rest is left to programs and their arrays."""

ROOM_BYTES = 2**28
"""Bytes of a checkpoint message that are left to environments and the learner, beside the replay memory."""


class ReplaySize(NamedTuple):
    """Size of a replay memory in steps and bytes."""

    steps: int
    """Number of steps that the memory of one seed holds, over all environments."""
    total: int
    """Bytes of the memory, over all environments and seeds."""

    @property
    def of_a_step(self) -> float:
        """Bytes that one step of one seed takes."""
        return self.total / self.steps

    def __str__(self) -> str:
        return (
            f"replay memory: {self.steps:,} steps of {self.of_a_step:,.0f} bytes, {format_bytes(self.total)}, "
            "saved in each checkpoint"
        )


def replay_size(graph: Graph, *, num_seeds: int = 1) -> ReplaySize | None:
    """Returns the size of a graph's replay memory, or None if it has none. Nothing is allocated."""
    if graph.replay is None:
        return None
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    rings = jax.tree.leaves(jax.eval_shape(partial(empty_experience, graph), index))
    each = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in rings)
    return ReplaySize(graph.replay.capacity * graph.loops.num_envs, each * num_seeds)


def check_message_size(size: ReplaySize, *, place: str, replicas: int) -> None:
    """Checks that workers can send their parts of a replay memory, each in one message of a checkpoint.

    Raises a `UsageError` if a message would be too large. The error names its bytes and sizes that would fit.
    """
    parts = {"program": 0, "threads": 0, "mesh": 1}.get(place, replicas)
    if not parts:
        return
    from rollmill.processes.framing import LIMITS  # which a training in one process does without

    limit = LIMITS.array_bytes - ROOM_BYTES
    if size.total / parts <= limit:
        return
    fits = int(size.steps * limit * parts / size.total)
    raise UsageError(
        f"the replay memory of {size.steps:,} steps takes {format_bytes(size.total)}, but workers with "
        f"place={place} save it in messages of at most {format_bytes(limit)}. hint: buffer_size={fits} would "
        "fit, or place=program."
    )


def check_replay_size(size: ReplaySize, *, devices: Sequence[Any], replicas: int) -> None:
    """Checks that a replay memory, divided among replicas, fits into memory. Nothing is allocated.

    Raises a `UsageError` if it does not fit. The error names its bytes and sizes that would fit.
    """
    on_host = devices[0].platform == "cpu"
    # A checkpoint is a copy, which lies in the host's memory beside the replay memory of replicas on CPUs.
    needed = 2 * size.total if on_host else size.total / min(replicas, len(devices))
    limit = memory_bytes() if on_host else device_memory(devices[0])
    if limit is None or needed <= SHARE * limit:
        return
    fits = int(size.steps * SHARE * limit / needed)
    where = "this machine" if on_host else "each device"
    copies = ", and the same again while a checkpoint is written," if on_host else ""
    raise UsageError(
        (
            f"the replay memory of {size.steps:,} steps takes {format_bytes(size.total)}{copies} but {where} has "
            f"{format_bytes(limit)}. hint: buffer_size={fits} would fit"
        )
        + ("." if on_host else ", or more devices.")
    )
