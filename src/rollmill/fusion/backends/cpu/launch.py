"""The launch of machine code."""

from typing import NamedTuple


class CodeLaunch(NamedTuple):
    """The launch of machine code."""

    block: int
    """Environments, or samples, that are computed together; a power of two."""
    programs: int = 0
    """Parts of a sum over samples, which are summed apart."""
