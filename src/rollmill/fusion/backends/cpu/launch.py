"""How machine code is run, and where."""

import platform
from typing import NamedTuple

from rollmill.core.machine import usable_cores


class CodeLaunch(NamedTuple):
    """How machine code is run."""

    block: int
    """Environments, or samples, that are computed together; a power of two."""
    programs: int = 0
    """Parts of a sum over samples, which are summed apart."""


def describe_processor() -> str:
    """What launches, and the order of sums, were chosen for."""
    return f"{platform.machine()} CPU, {usable_cores()} cores"
