"""The command `rollmill gpu`, which lists the GPUs of this machine and how they can be shared."""

import contextlib
import shlex
import time
from dataclasses import dataclass
from typing import Annotated

from rollmill.cli.help import format_options
from rollmill.cli.parsing import HELP, parse
from rollmill.core.child_processes import run_program
from rollmill.core.errors import UsageError
from rollmill.core.options import Arg, options_of
from rollmill.core.text import format_bytes
from rollmill.gpus.activity import ActivityMonitor
from rollmill.gpus.devices import find_gpus, open_nvml
from rollmill.gpus.mig import check_slices, mig_commands, mig_layout
from rollmill.gpus.sharing import choose_sharing


def run(arguments: list[str]) -> int:
    """Lists the GPUs, or divides one with MIG. Returns the exit code."""
    if HELP & set(arguments):
        print(_help())
        return 0
    if arguments[:1] == ["partition"]:
        chosen = parse(_Partition, arguments[1:], prog="rollmill gpu partition")
        if chosen.slices is None:
            raise UsageError("rollmill gpu partition needs --slices N, with N between 1 and 7.")
        return _partition(chosen.gpu, chosen.slices, confirmed=chosen.yes)
    return _list(parse(_Listing, arguments, prog="rollmill gpu").seconds)


@dataclass(frozen=True)
class _Listing:
    """List the GPUs, how busy each is, and how several processes would share them."""

    seconds: float = 1.0
    """Time to measure activity for."""


@dataclass(frozen=True)
class _Partition:
    """Divide a GPU with MIG."""

    slices: int | None = None
    """Number of slices, from 1 to 7."""
    gpu: int = 0
    """The GPU, as nvidia-smi counts."""
    yes: Annotated[bool, Arg(only_on=True)] = False
    """Run the commands."""


def _help() -> str:
    return format_options(
        {"options": options_of(_Listing), "options of partition": options_of(_Partition)},
        prog="rollmill gpu",
        usage="rollmill gpu [--seconds FLOAT]\n       rollmill gpu partition --slices INT [--gpu INT] [--yes]",
        description=(
            "List the GPUs, their load, and how several processes would share them. `partition` prints the "
            "commands that divide a GPU into equal MIG slices, and runs them with --yes. This needs "
            "administrator rights and an idle GPU, and removes existing slices."
        ),
    )


def _list(seconds: float) -> int:
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds {seconds:g} must be greater than 0 and at most 3600.")
    with open_nvml() as nvml:
        gpus = find_gpus(nvml)
        with contextlib.ExitStack() as stack:
            monitors = [stack.enter_context(ActivityMonitor(nvml, gpu.index)) for gpu in gpus]
            time.sleep(seconds)
            activities = [monitor.read() for monitor in monitors]
    for gpu, activity in zip(gpus, activities, strict=True):
        used, memory = format_bytes(gpu.used_bytes), format_bytes(gpu.memory_bytes)
        print(f"GPU {gpu.index}: {gpu.name}, {used} of {memory} in use")
        print(f"  activity: {str(activity) or 'unknown'}")
        if gpu.mig:
            print(f"  MIG is enabled, with {len(gpu.slices)} slices")
        for part in gpu.slices:
            print(f"  {part.uuid}: {format_bytes(part.memory_bytes)}, {part.multiprocessors} multiprocessors")
    way, reason = choose_sharing(gpus, "auto")
    print(f"several processes would share these GPUs through {way}: {reason}")
    return 0


def _partition(index: int, slices: int, *, confirmed: bool) -> int:
    check_slices(slices)
    with open_nvml() as nvml:
        gpus = {gpu.index: gpu for gpu in find_gpus(nvml)}
        if index not in gpus:
            raise UsageError(f"--gpu {index} does not exist. This machine has GPUs {', '.join(map(str, gpus))}.")
        layout = mig_layout(nvml, gpus[index], slices)
    print(f"# {layout}")
    commands = mig_commands(layout)
    for line in commands:
        print(line, flush=True)
        if confirmed and (code := run_program(*shlex.split(line), stdin=None).returncode):
            raise UsageError(f"`{line}` failed with exit code {code}. The commands before it were not undone.")
    if not confirmed:
        print("# nothing was changed. Add --yes to run these commands.")
    return 0
