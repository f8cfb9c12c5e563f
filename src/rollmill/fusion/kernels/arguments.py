"""The arrays that a kernel is given."""

from collections.abc import Sequence
from typing import Any


class KernelArguments:
    """Arrays in an order, each once."""

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def index_of(self, array: Any) -> int:
        """Returns the place of an array, which is given from now on."""
        # By identity, for tracers cannot be compared; each array is one pointer of the kernel, however often it is
        # used.
        for number, known in enumerate(self.arrays):
            if known is array:
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1
