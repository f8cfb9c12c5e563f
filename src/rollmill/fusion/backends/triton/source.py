"""Collects the source of a kernel while it is generated."""

from collections.abc import Sequence

from rollmill.core.machine import Numerics
from rollmill.fusion.backends.triton.hoist import NOTHING_KEPT, Hoisted, KeptMatrices
from rollmill.fusion.backends.triton.memory import BY_TRITON, Memory


class KernelSource:
    """Source lines of a kernel: `before` holds those before its main loop, and `lines` the part being written."""

    def __init__(
        self,
        numerics: Numerics,
        slots: Sequence[str],
        *,
        indent: int = 1,
        memory: Memory = BY_TRITON,
        prefix: str = "v",
        kept: KeptMatrices = NOTHING_KEPT,
    ) -> None:
        """Prepares a source without lines, in which all names begin with `prefix`.

        `numerics` is the precision of everything that need not be exact. `slots` are pointers to uniform arrays;
        `memory` reads and writes. The first part has this indentation. `kept` are matrices loaded only once where
        others are reloaded in every iteration.
        """
        self.numerics: Numerics = numerics
        self.slots, self.memory = slots, memory
        self.before = Hoisted(numerics, slots, self.fresh, memory=memory, kept=kept)
        self.lines: list[str] = []
        self._indent, self._prefix, self._count = indent, prefix, 0

    def line(self, text: str) -> None:
        """Adds a line to the part that is being written."""
        self.lines.append("    " * self._indent + text)

    def deeper(self, by: int = 1) -> None:
        """Indents the following lines of the kernel by `by` more levels."""
        self._indent += by

    def fresh(self) -> str:
        """Returns a variable name that the kernel does not use yet."""
        self._count += 1
        return f"{self._prefix}{self._count}"
