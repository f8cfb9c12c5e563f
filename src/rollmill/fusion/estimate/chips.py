"""Peak rates of GPUs from NVIDIA white papers, and the speed limits that result."""

from typing import NamedTuple

import jax

from rollmill.core.errors import unknown_name
from rollmill.core.machine import Numerics
from rollmill.fusion.estimate.cost import Cost


class Chip(NamedTuple):
    """Peak rates of a GPU, per multiprocessor and clock cycle unless stated otherwise."""

    compute_capability: int
    """Compute capability, such as 90 for 9.0."""
    num_multiprocessors: int
    clock_hz: float
    """Boost clock in Hz."""
    memory_bandwidth: float
    """Memory bandwidth in bytes per second."""
    tensor_rate: float
    """Tensor-core operations on 16-bit floats with float32 accumulation. The rate for tf32 is half as high."""
    float_rate: float = 128.0
    integer_rate: float = 64.0
    special_rate: float = 16.0
    instruction_rate: float = 128.0
    """Instructions per cycle that the four schedulers issue, counted once for each thread."""

    def bounds(self, cost: Cost, num_bytes: int, numerics: Numerics) -> dict[str, float]:
        """Returns upper bounds on executions per second, by the resource that limits them.

        `cost` and `num_bytes` are the operations and the memory traffic of one execution.
        """
        tensor = {"bfloat16": self.tensor_rate, "tf32": self.tensor_rate / 2, "float32": 2 * self.float_rate}[
            numerics
        ]
        clocks = self.num_multiprocessors * self.clock_hz
        limits = {
            "instructions": (cost.instructions, self.instruction_rate * clocks),
            "integer units": (cost.integers, self.integer_rate * clocks),
            "special functions": (cost.special, self.special_rate * clocks),
            "tensor cores" if numerics != "float32" else "matrix products": (cost.tensor, tensor * clocks),
            "memory": (num_bytes, self.memory_bandwidth),
        }
        return {name: rate / count for name, (count, rate) in limits.items() if count > 0}


CHIPS = {
    "A100": Chip(80, 108, 1.41e9, 2.04e12, 2048, float_rate=64),
    "H100": Chip(90, 132, 1.83e9, 3.35e12, 4096),
    "H200": Chip(90, 132, 1.83e9, 4.8e12, 4096),
    "L4": Chip(89, 58, 2.04e9, 0.3e12, 512),
    "RTX 3090": Chip(86, 82, 1.70e9, 0.936e12, 256),
    "RTX 4090": Chip(89, 128, 2.52e9, 1.008e12, 512),
    "RTX 5090": Chip(120, 170, 2.41e9, 1.79e12, 512, integer_rate=128),
}


def find_chip(name: str | None) -> tuple[str, Chip]:
    """Returns the name and the rates of a GPU.

    Without a name, returns this machine's GPU, or the H200 if there is no GPU or it is not recognised. Raises a
    `UsageError` for an unknown name.
    """
    if name is None:
        kinds = [device.device_kind for device in jax.devices() if device.platform == "gpu"]
        name = next((known for known in CHIPS if kinds and known in kinds[0]), "H200")
    if name not in CHIPS:
        raise unknown_name("chip", name, CHIPS)
    return name, CHIPS[name]
