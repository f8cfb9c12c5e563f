"""Classifies the events of a trace: an instruction of a compiled program, an activity of the host, or neither."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rollmill.core.operations import GRADIENTS_KERNEL, INNER, ROLLOUT_KERNEL, SPAN_MARK
from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.results import UNNAMED
from rollmill.profiling.trace import CLOCK, Event

Programs: TypeAlias = Mapping[str, Mapping[str, Instruction]]
"""Instructions of each compiled program, by the program's key and by name."""

COPIES_ON_DEVICE = "copies"
MAX_KERNEL_NAME = 60
"""Maximum length of a library kernel's name in characters."""

ROOT = Instruction("container", {(): 1.0}, 0.0, 0.0)
"""Stands for an event of a whole compiled program."""
RUNNING = Instruction("container", {(): 1.0}, 0.0, 0.0)
"""Stands for a compiled program whose work other threads do."""

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
        (r"^cu(da)?[A-Z]", "CUDA", "cuda"),
        (r"PjitFunction|Execute|ParseArguments|Dispatch", "dispatch", "dispatch"),
    )
)
"""Patterns for the names of calls into JAX and the driver. The first match counts."""
CALLS = frozenset((activity, category) for _, activity, category in HOST_CALLS)
"""Activities that are calls rather than operations, with their categories."""

ROLLOUT_KERNEL_PATH: Path = ("collect", "rollout kernel")
"""The single operation that stands for a fused rollout kernel."""
OWN_KERNELS = {
    ROLLOUT_KERNEL: Instruction("kernel", {ROLLOUT_KERNEL_PATH: 1.0}, 0.0, 0.0),
    GRADIENTS_KERNEL: Instruction("kernel", {("learn", "gradients"): 1.0}, 0.0, 0.0),
}
"""Kernels of Rollmill's GPU backends, by name."""


class DeviceWork(NamedTuple):
    """State of a thread or stream that computes an instruction of a compiled program."""

    instruction: Instruction


class KernelStart(NamedTuple):
    """State of a stream in the short gap before a kernel, while the kernel is being launched."""

    instruction: Instruction


class HostActivity(NamedTuple):
    """State of a thread that performs a host activity."""

    name: str
    """An operation, such as `collect/environment`, or a call, such as `dispatch`."""
    category: str

    @property
    def path(self) -> Path:
        """The path of the operation that the activity belongs to."""
        return tuple(self.name.split("/"))

    def inside(self, around: "HostActivity | None") -> "HostActivity":
        """Returns this activity as a part of an enclosing activity.

        The user's operations are parts of the enclosing operation. A call that launches work of an operation
        belongs to that operation.
        """
        if self.category == INNER:
            if around is None or around == PYTHON or around.is_call:
                return self._replace(category=PYTHON.category)
            return HostActivity(f"{around.name}/{self.name}", around.category)
        if around is None:
            return self
        is_call = self.is_call and self.category != "waiting"
        starts_operation = around.category in ("dispatch", "cuda") and not around.is_call
        belongs = (is_call and starts_operation) or around.name.startswith(f"{self.name}/")
        return self._replace(name=around.name) if belongs else self

    @property
    def is_call(self) -> bool:
        """True for a call into JAX or the driver, and False for an operation."""
        return (self.name, self.category) in CALLS


PYTHON = HostActivity("python", "python")
"""Stands for a thread that runs Python code outside any operation."""


def is_span(event: Event) -> bool:
    """Returns whether an event is a span recorded by Rollmill itself."""
    return event.name.startswith(f"{SPAN_MARK}:") and not event.name.startswith(f"{SPAN_MARK}:{CLOCK}:")


EventClass: TypeAlias = DeviceWork | HostActivity | None
"""The work or activity that an event stands for, or None if the enclosing event counts."""
LaneState: TypeAlias = EventClass | KernelStart
"""The state of a thread or stream at one time, or None if it is idle."""


class Classifier:
    """Classifies the events of a process's compiled programs, with a cache by name.

    On an accelerator (`accelerated`), host events that are named after instructions are launches.
    """

    def __init__(self, programs: Programs, *, accelerated: bool = False) -> None:
        self._programs, self._accelerated = programs, accelerated
        self._by_name: dict[str, list[str]] = {}
        for module, instructions in programs.items():
            for name in instructions:
                self._by_name.setdefault(name, []).append(module)
        # GPU kernels are named after instructions, with characters that C allows.
        self._by_kernel = {re.sub(r"[.\-]", "_", name): name for name in self._by_name}
        self._known: dict[tuple[str, str, str, bool], EventClass] = {}

    def is_instruction(self, name: str) -> bool:
        """Returns whether any program has an instruction called `name`."""
        return bool(self._modules_with(name))

    def is_ambiguous(self, name: str) -> bool:
        """Returns whether several programs have an instruction called `name`."""
        return len(self._modules_with(name)) > 1

    def _modules_with(self, name: str) -> Sequence[str]:
        return self._by_name.get(name) or self._by_name.get(self._by_kernel.get(name, name), ())

    def __call__(self, event: Event, *, on_device: bool = False) -> EventClass:
        """Classifies an event. On a device everything is work."""
        key = event.name, event.module, event.instruction, on_device
        if key not in self._known:
            self._known[key] = self._classify(event, on_device)
        return self._known[key]

    def _classify(self, event: Event, on_device: bool) -> EventClass:
        name = event.name
        if name.startswith(f"{SPAN_MARK}:"):
            _, category, activity = name.split(":", 2)
            return None if category == CLOCK else HostActivity(activity, category)
        if on_device:
            return DeviceWork(self.device_instruction(event))
        if (instruction := self._instruction(name, event.module)) is not None:
            return _start_of(instruction) if self._accelerated else DeviceWork(instruction)
        if name == "ThunkExecutor::Execute":
            return DeviceWork(ROOT)
        if name == "ThunkExecutor::Execute (wait for completion)":
            return DeviceWork(RUNNING)
        for pattern, activity, category in HOST_CALLS:
            if pattern.search(name):
                return HostActivity(activity, category)
        return None

    def device_instruction(self, event: Event) -> Instruction:
        """Returns the instruction that the device reports for an event, or else the instruction that the event's
        kernel is named after.

        XLA compiles equal instructions into one kernel, which is named after one of them, so the name may belong
        to another operation. In a CUDA graph, only the name is known.
        """
        if (own := OWN_KERNELS.get(event.name)) is not None:
            return own
        said = self._instruction(event.instruction, event.module)
        if said is not None and said.kind != "container":
            return said
        return self._instruction(event.name, event.module) or said or _classify_unnamed(event.name)

    def _instruction(self, name: str, module: str) -> Instruction | None:
        name = name if name in self._by_name else self._by_kernel.get(name, name)
        modules = self._by_name.get(name)
        if not modules:
            return None
        plain = module.partition("/")[0]  # the number may be missing, or another number
        alike = [each for each in modules if each.partition("/")[0] == plain] or modules
        return self._programs[module if module in modules else alike[0]][name]


def kernel_name(name: str) -> str:
    """Shortens the name of a library kernel by removing namespaces, template arguments and parameters.

    All copies get the same name, whether they are kernels of a CUDA graph or transfers by the driver.
    """
    if re.match(r"memcpy\d|MemcpyD2D", name):
        return COPIES_ON_DEVICE
    plain = re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).rpartition("::")[2]
    return re.sub(r"[^\w.\-]", "_", plain)[:MAX_KERNEL_NAME] or "kernel"


def _start_of(instruction: Instruction) -> HostActivity:
    """Returns the host's part of a device instruction: its launch."""
    path = next(iter(instruction.shares)) if len(instruction.shares) == 1 else ()
    return HostActivity("/".join(path) or "dispatch", "dispatch")


def _classify_unnamed(name: str) -> Instruction:
    """Returns device work without an instruction's name: copies, collectives, library kernels."""
    shares = {(UNNAMED, kernel_name(name)): 1.0}
    if re.search(r"[Mm]em(cpy|set)", name):
        return Instruction("copy", shares, 0.0, 0.0)
    return Instruction("collective" if "nccl" in name.lower() else "kernel", shares, 0.0, 0.0)
