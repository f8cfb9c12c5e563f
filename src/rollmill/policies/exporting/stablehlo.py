"""Exports policies as StableHLO with `jax.export`."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import export

from rollmill.policies.exporting.interface import ExportedFunction
from rollmill.policies.exporting.metadata import BATCH
from rollmill.policies.exporting.parity import Run

PLATFORMS = ("cpu", "cuda")


def to_stablehlo(exported: ExportedFunction) -> bytes:
    """Serialises an exported policy as StableHLO, for CPUs and NVIDIA GPUs.

    Inputs and outputs have a leading axis of any length. Matrix products are computed in float32 on all devices.
    To run the program, use `jax.export.deserialize(data).call(...)`.
    """
    (batch,) = export.symbolic_shape(BATCH)
    given = [jax.ShapeDtypeStruct((batch, *each.shape), each.struct.dtype) for each in exported.inputs]
    with jax.default_matmul_precision("highest"):
        program = export.export(jax.jit(jax.vmap(exported.function)), platforms=PLATFORMS)(*given)
    return bytes(program.serialize())


def run_stablehlo(data: bytes) -> Run:
    """Returns a serialised StableHLO program as a function of NumPy arrays."""
    program = export.deserialize(bytearray(data))

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [np.asarray(each) for each in program.call(*inputs)]

    return run
