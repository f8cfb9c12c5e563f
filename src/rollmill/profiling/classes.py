"""Says what an event of a trace is: work of a compiled program, an activity of the host, or nothing of its own."""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from rollmill.core.operations import GRADIENTS_KERNEL, ROLLOUT_KERNEL, SPAN_MARK
from rollmill.profiling.hlo import Instruction, Path
from rollmill.profiling.trace import CLOCK, Event

Programs: TypeAlias = Mapping[str, Mapping[str, Instruction]]
"""Instructions of each compiled program, by the names of program and instruction."""

ROOT = Instruction("container", {(): 1.0}, 0.0, 0.0)
"""The whole of a compiled program."""

HOST_CALLS: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern), activity, category)
    for pattern, activity, category in (
        (r"wait for completion|::Await|BlockHostUntilReady|block_until_ready|Synchronize", "device", "waiting"),
        (r"[Cc]ompile|MLIR|[Ll]owering|trace_to_jaxpr", "compile", "compile"),
        (
            r"TransferToDevice|TransferFromDevice|BufferFromHost|CopyToHost|ToLiteral|[Mm]emcpy|device_put",
            "transfer",
            "transfer",
        ),
        (r"PjitFunction|Execute|ParseArguments|cuLaunch|cudaLaunch|cuGraph|Dispatch", "dispatch", "dispatch"),
    )
)
"""Calls into the framework by patterns of their names; the first that fits counts."""

OWN_KERNELS = {
    ROLLOUT_KERNEL: Instruction("kernel", {("collect", "rollout kernel"): 1.0}, 0.0, 0.0),
    GRADIENTS_KERNEL: Instruction("kernel", {("learn", "gradients"): 1.0}, 0.0, 0.0),
}
"""Kernels of Rollmill's backends for GPUs, by their names."""


class DeviceWork(NamedTuple):
    """The work of an instruction of a compiled program."""

    instruction: Instruction


class HostActivity(NamedTuple):
    """An activity of the host."""

    name: str
    """An operation, such as `collect/environment`, or a call, such as `dispatch`."""
    category: str

    @property
    def path(self) -> Path:
        """The operation that it belongs to."""
        return tuple(self.name.split("/"))


def is_span(event: Event) -> bool:
    """True for the spans of Rollmill's own code, which runs in Python."""
    return event.name.startswith(f"{SPAN_MARK}:") and not event.name.startswith(f"{SPAN_MARK}:{CLOCK}:")


EventClass: TypeAlias = DeviceWork | HostActivity | None
"""The work or activity that an event stands for; None if the event around it counts."""


class Classifier:
    """Classes of events, remembered by name.

    Args:
        programs: the compiled programs of the process.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._by_name: dict[str, list[str]] = {}
        for module, instructions in programs.items():
            for name in instructions:
                self._by_name.setdefault(name, []).append(module)
        # Kernels of a GPU are named after instructions, with characters that C allows.
        self._by_kernel = {re.sub(r"[.\-]", "_", name): name for name in self._by_name}
        self._known: dict[tuple[str, str], EventClass] = {}

    def is_ambiguous(self, name: str) -> bool:
        """True if several programs have an instruction of that name."""
        return len(self._by_name.get(self._by_kernel.get(name, name), ())) > 1

    def __call__(self, event: Event, *, on_device: bool = False) -> EventClass:
        """The class of an event; on a device everything is work."""
        key = event.name, event.module
        if key not in self._known:
            self._known[key] = self._classified(event, on_device)
        return self._known[key]

    def _classified(self, event: Event, on_device: bool) -> EventClass:
        name = event.name
        if name.startswith(f"{SPAN_MARK}:"):
            _, category, activity = name.split(":", 2)
            return None if category == CLOCK else HostActivity(activity, category)
        if (instruction := self._instruction(name, event.module)) is not None:
            return DeviceWork(instruction)
        if on_device:
            return DeviceWork(OWN_KERNELS.get(name) or _unnamed(name))
        if name == "ThunkExecutor::Execute":
            return DeviceWork(ROOT)
        for pattern, activity, category in HOST_CALLS:
            if pattern.search(name):
                return HostActivity(activity, category)
        return None

    def _instruction(self, name: str, module: str) -> Instruction | None:
        name = name if name in self._by_name else self._by_kernel.get(name, name)
        modules = self._by_name.get(name)
        if not modules:
            return None
        return self._programs[module if module in modules else modules[0]][name]


def _unnamed(name: str) -> Instruction:
    """Work of a device that no instruction has the name of: copies, collectives, kernels of libraries."""
    if re.search(r"[Mm]em(cpy|set)", name):
        return Instruction("copy", {(): 1.0}, 0.0, 0.0)
    return Instruction("collective" if "nccl" in name.lower() else "kernel", {(): 1.0}, 0.0, 0.0)
