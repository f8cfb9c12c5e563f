"""Profiles made by hand, of believable trainings."""

from collections.abc import Sequence
from dataclasses import replace

from rollmill.profiling.results import (
    BookKeeping,
    Ceilings,
    DeviceActivity,
    HostTime,
    IterationTime,
    MemoryUse,
    OperationMemory,
    OperationTime,
    Overlap,
    ProcessTime,
    Profile,
    ProfiledMachine,
    ProfiledSetup,
    TimelineSpan,
)

TRAINING = ProfiledSetup(
    algorithm="ppo",
    environment="CartPole-v1",
    command="rollmill profile ppo CartPole-v1 --fusion off",
    placement="one program",
    fusion="off",
    num_envs=1024,
    num_steps=64,
    env_steps=65_536,
    possible_fusion="full",
)
OPERATIONS = (
    OperationTime(("collect",), device=0.0005, host=0.0008, kernels=12.0),
    OperationTime(("collect", "policy"), device=0.0040, host=0.0031, kernels=640.0, flops=4.0e9, bytes=2.1e9),
    OperationTime(
        ("collect", "environment"),
        device=0.0021,
        host=0.0042,
        kernels=1280.0,
        mixed=0.0006,
        flops=3.0e8,
        bytes=9.0e8,
    ),
    OperationTime(("learn",), device=0.0004, host=0.0006, kernels=20.0),
    OperationTime(("learn", "prepare"), device=0.0015, host=0.0002, kernels=30.0, flops=2.0e8, bytes=1.5e9),
    OperationTime(
        ("learn", "gradients"), device=0.0186, host=0.0021, kernels=900.0, mixed=0.0012, flops=2.4e11, bytes=3.2e10
    ),
    OperationTime(("learn", "update"), device=0.0032, host=0.0011, kernels=320.0, flops=1.0e8, bytes=2.0e9),
    OperationTime(("metrics",), device=0.0001, host=0.0025, kernels=4.0),
)
HOST = (
    HostTime("metrics and log", "python", 0.0019),
    HostTime("dispatch", "dispatch", 0.0064),
    HostTime("copy of metrics", "transfer", 0.0008),
    HostTime("metrics.jsonl", "storage", 0.0011),
    HostTime("wait for device", "waiting", 0.0211),
)
OVERLAP = Overlap(host_only=0.0146, device_only=0.0211, both=0.0093, neither=0.0029)


def timeline(length: float = 0.0958, spans: int = 120) -> tuple[TimelineSpan, ...]:
    """Spans of a host's and a device's lane in turns."""
    names = ("collect/policy", "collect/environment", "learn/gradients", "learn/update")
    each = length / spans
    device = [
        TimelineSpan("device 0", names[(index * 4) // spans], index * each, (index + 0.8) * each)
        for index in range(spans)
    ]
    host = [
        TimelineSpan("host", "dispatch" if index % 2 == 0 else "wait for device", start, start + 6 * each)
        for index, start in enumerate(each * 8 * number for number in range(spans // 8))
    ]
    return (*host, *device)


COURSE = tuple((61 + step) << 20 for step in range(120))
USES = (
    OperationMemory(("learn", "gradients"), 180 << 20, COURSE),
    OperationMemory(("learn", "shuffle"), 24, (24,) * 120),
)


def process(name: str = "training", **changes) -> ProcessTime:
    """A process with a host that starts programs and waits for the device."""
    transitions = {"host to framework": 14.0, "host to device memory": 3206.0, "waits": 2.0}
    made = ProcessTime(name, HOST, OVERLAP, transitions, timeline())
    return replace(made, **changes)


def profile(*, processes: Sequence[ProcessTime] = (), training: dict | None = None, **changes) -> Profile:
    """A profile of PPO on a GPU without fusion: 47.2 ms an iteration, 47.9 ms corrected."""
    made = Profile(
        training=replace(TRAINING, **(training or {})),
        machine=ProfiledMachine("1 NVIDIA H200", 16, {"rollmill": "0.1.0", "jax": "0.10.2", "CUDA": "13.0"}),
        iteration=IterationTime(unprofiled=0.0472, profiled=0.1463, corrected=0.0479, iterations=24, windows=4),
        book_keeping=(
            BookKeeping("kernel", 3206.0, 28_400.0),
            BookKeeping("host span", 212.0, 640.0),
            BookKeeping("transition", 3222.0, 2_270.0),
        ),
        operations=OPERATIONS,
        processes=tuple(processes) or (process(),),
        ceilings=Ceilings(flops_per_second=4.9e13, bytes_per_second=3.9e12),
        memory=(
            MemoryUse("jit_collect", arguments=1 << 20, outputs=48 << 20, temporary=70 << 20),
            MemoryUse("jit_learn", arguments=49 << 20, outputs=1 << 20, temporary=210 << 20, operations=USES),
        ),
        devices=(DeviceActivity("GPU 0", utilisation=0.97, sm_activity=0.21, occupied=0.63),),
        notes=("Thunks of a fused loop are counted once.",),
    )
    return replace(made, **changes)
