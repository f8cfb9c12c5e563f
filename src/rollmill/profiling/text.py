"""Formats values, durations and names for the reports of a profile."""

import math

from rollmill.core.text import compact, format_count, number, one_line
from rollmill.profiling.breakdown import device_kinds, whole_time, working_processes
from rollmill.profiling.results import MemoryUse, Profile

NOTHING_TO_ADVISE = (
    "No rule applies: no known change of an option would save a tenth of the time. This does not prove that "
    "training cannot be faster. The longest operations above are where to look. To divide an operation of your "
    'own code, name its parts: `with rollmill.operation("collisions"):`.'
)

NOT_TESTED = "not tested"
LARGE_ERROR = 0.05
"""Error of the correction from which the report says how to reduce it."""
MANY_WINDOWS = 129
"""Number of windows that gave a smaller error in six runs on CPU cores (`benchmarks/profiler.py`)."""


def milliseconds(seconds: float) -> str:
    """Formats a duration in milliseconds, without the unit. Less than a tenth of a microsecond becomes 0."""
    value = seconds * 1e3
    return "0" if abs(value) < 1e-4 else number(value)


def duration(seconds: float) -> str:
    """Formats a duration with a suitable unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds / 1e-9)} ns" if seconds else "0 ms"


def percent(share: float) -> str:
    """Formats a fraction as a percentage."""
    return f"{share * 100:.1f} %"


def about_percent(share: float) -> str:
    """Formats a fraction as a whole percentage."""
    return f"{share * 100:.0f} %"


def signed_percent(share: float) -> str:
    """Formats a relative change as a signed percentage."""
    return f"{share * 100:+.1f} %"


def times(ratio: float) -> str:
    """Formats a ratio, such as `3.10×`."""
    return f"{number(ratio)}×"


def count(value: float) -> str:
    """Formats a count: integers as such, and small means with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value, 0) else number(value)


def size_of(amount: int | float) -> str:
    """Formats a number of bytes with a suitable unit."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(amount) >= size:
            return f"{number(amount / size)} {unit}"
    return f"{amount:,.0f} B"


def path_text(path: tuple[str, ...]) -> str:
    """Formats the path of an operation: `collect / policy`."""
    return one_line(" / ".join(path))


def fullest_text(memory: MemoryUse, most: int) -> str:
    """Names the operations that use most of a program's temporary memory at its peak."""
    live = [one for one in memory.operations if one.bytes]
    shown = [f"{path_text(one.path)} {size_of(one.bytes)}" for one in live[:most]]
    return ", ".join([*shown, "..."] if len(live) > most else shown)


def profile_title(profile: Profile) -> str:
    """Returns the title of a profile: its algorithm and environment."""
    return one_line(f"{profile.training.algorithm} on {profile.training.environment}")


def machine_text(profile: Profile) -> str:
    """Returns a line with the device, the cores and the placement of a profiled run."""
    machine, training = profile.machine, profile.training
    cores = format_count(machine.cores, "core")
    return one_line(f"{machine.device}, {cores}; {training.placement}; fusion {training.fusion}")


def speed_of(profile: Profile) -> float:
    """Returns the environment steps per second of a profiled run, or 0 if no iteration was timed."""
    return profile.steps_per_second if profile.iteration.unprofiled > 0 else 0.0


def speed_text(profile: Profile) -> str:
    """Formats the environment steps per second of a profiled run, with their unit."""
    speed = speed_of(profile)
    if not speed:
        return "steps/s unknown"
    return f"{compact(speed)} steps/s"


def sizes_text(profile: Profile) -> str:
    """Formats the environment steps of an iteration as a product of their factors."""
    training = profile.training
    factors = f"{training.num_envs:,} environments × {training.num_steps:,} steps"
    if training.num_seeds > 1:
        factors += f" × {training.num_seeds:,} seeds"
    return f"{training.env_steps:,} steps ({factors})"


def device_kinds_text(profile: Profile) -> str:
    """Returns a sentence with the shares in which devices compute, copy, exchange data and are idle."""
    whole, kinds = whole_time(profile), device_kinds(profile)
    kernels, copies, collectives, idle = (percent(whole.share(seconds)) for seconds in kinds)
    return f"The device: kernels {kernels}, copies {copies}, collectives {collectives}, idle {idle}."


def summed_over_text(profile: Profile) -> str:
    """Returns a clause that states over how many processes times are summed, or an empty string for one
    process.
    """
    working = len(working_processes(profile.processes))
    return f", summed over the {working} processes that train" if working > 1 else ""


def correction_text(profile: Profile) -> str:
    """Returns sentences about the slowdown caused by the profiler, and the error after its correction."""
    iteration = profile.iteration
    if iteration.unprofiled <= 0:
        return "Training was not timed without the profiler, so the correction cannot be checked."
    slowed = f"The profiler slowed training by {times(iteration.profiled / iteration.unprofiled)}; "
    if not is_correction_tested(profile):
        return f"{slowed}the correction was {NOT_TESTED}, because that takes two windows with the profiler."
    corrected, unprofiled = duration(iteration.corrected), duration(iteration.unprofiled)
    figures = f"corrected {corrected} per iteration, without it {unprofiled}, an error of {error_text(profile)}."
    return f"{slowed}{figures}{_how_to_lower_error(profile)}"


def _how_to_lower_error(profile: Profile) -> str:
    """Returns a sentence with the option for more windows, if the error is large and they were few."""
    read = sum(window.read for window in profile.windows)
    if not read or abs(profile.iteration.error) < LARGE_ERROR or len(profile.windows) >= MANY_WINDOWS:
        return ""
    unread = math.ceil(MANY_WINDOWS / read) - 1
    return f" Differences below that are noise. --unread-windows {unread} takes longer and usually lowers it."


def error_text(profile: Profile) -> str:
    """Formats the error of the profiler's correction."""
    return signed_percent(profile.iteration.error) if is_correction_tested(profile) else NOT_TESTED


def is_correction_tested(profile: Profile) -> bool:
    """Returns whether windows were corrected with the cost in other windows, which a single window does
    not allow.
    """
    return len(profile.windows) != 1
