"""The launch of machine code, and the name of the processor."""

import platform
from typing import NamedTuple

from rollmill.core.machine import usable_cores


class CodeLaunch(NamedTuple):
    """The launch of machine code."""

    block: int
    """Environments, or samples, that are computed together; a power of two."""
    programs: int = 0
    """Parts of a sum over samples, which are summed apart."""


def describe_processor() -> str:
    """Name of this processor; launches, and with them the order of sums, are chosen for it."""
    return f"{platform.machine()} CPU, {usable_cores()} cores"
