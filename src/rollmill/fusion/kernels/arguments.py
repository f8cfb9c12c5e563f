"""The arrays that a kernel is given."""

from collections.abc import Sequence
from typing import Any


class KernelArguments:
    """Arrays in an order, each once."""

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def index_of(self, array: Any) -> int:
        """The place of an array, which is given from now on."""
        for number, known in enumerate(self.arrays):
            if known is array:
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1
