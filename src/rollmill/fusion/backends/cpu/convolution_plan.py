"""Plans convolutions: which kernel taps meet which pixels.

Images are `[batch, rows, columns, channels]` and kernels `[rows, columns, inputs, outputs]`. The gradient of a
strided convolution's image is a convolution of an image dilated by zeros. Its result has phases: at regularly
spaced positions the same kernel taps meet values, and all others meet zeros.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

Pair: TypeAlias = tuple[int, int]
"""One number for rows and one for columns, or one before and one after."""


class Phase(NamedTuple):
    """Output positions that use the same kernel taps."""

    first: Pair
    """Row and column of the first place. The next is `ResultPlan.spread` further."""
    count: Pair
    source: Pair
    """Row and column of the padded image where the sum of the first place begins."""
    taps: tuple[range, range]
    """Rows and columns of the kernel."""


class ResultPlan(NamedTuple):
    """Plan of a convolution, without the zeros of a dilated image."""

    batch: int
    image: tuple[int, int, int]
    padding: tuple[Pair, Pair]
    """Zeros before and after the rows, and the columns."""
    strides: Pair
    """Distance between the sources of adjacent places of a phase."""
    result: tuple[int, int, int]
    spread: Pair
    phases: tuple[Phase, ...]

    @property
    def operations(self) -> int:
        """Returns the multiplications and additions for one image."""
        each = (phase.count[0] * phase.count[1] * len(phase.taps[0]) * len(phase.taps[1]) for phase in self.phases)
        return 2 * sum(each) * self.image[2] * self.result[2]


class KernelGradientPlan(NamedTuple):
    """Plan of a kernel's gradient, computed from the image and the result's gradient."""

    batch: int
    image: tuple[int, int, int]
    padding: tuple[Pair, Pair]
    gradient: tuple[int, int, int]
    """Rows, columns and channels of the result's gradient."""
    strides: Pair
    kernel: Pair
    """Rows and columns of the kernel."""

    @property
    def operations(self) -> int:
        """Returns the multiplications and additions for one image."""
        rows, columns, outputs = self.gradient
        return 2 * rows * columns * outputs * self.kernel[0] * self.kernel[1] * self.image[2]


class _Along(NamedTuple):
    """Part of a phase along one axis."""

    first: int
    count: int
    source: int
    taps: range


def result_plan(
    image: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
) -> ResultPlan:
    """Plans a convolution of an image dilated by `dilation - 1` zeros.

    Raises a `ValueError` if an axis is both dilated and strided.
    """
    axes = list(zip(image[1:3], kernel[:2], strides, padding, dilation, strict=True))
    phases = [_phases(*axis) for axis in axes]
    lengths = [_length(*axis) for axis in axes]
    wide = [_zeros_around(along, axis[0], axis[2]) for along, axis in zip(phases, axes, strict=True)]
    joined = [
        Phase(
            (rows.first, columns.first),
            (rows.count, columns.count),
            (rows.source + wide[0][0], columns.source + wide[1][0]),
            (rows.taps, columns.taps),
        )
        for rows, columns in product(*phases)
    ]
    return ResultPlan(
        batch=image[0],
        image=(image[1], image[2], image[3]),
        padding=(wide[0], wide[1]),
        strides=(strides[0], strides[1]),
        result=(lengths[0], lengths[1], kernel[3]),
        spread=(dilation[0], dilation[1]),
        phases=tuple(joined),
    )


def _length(length: int, taps: int, stride: int, padding: Pair, dilation: int) -> int:
    """Returns the length of a result along one axis."""
    return ((length - 1) * dilation + 1 + sum(padding) - taps) // stride + 1


def _phases(length: int, taps: int, stride: int, padding: Pair, dilation: int) -> list[_Along]:
    """Returns the phases along one axis. At place `y`, tap `k` meets number `(y * stride + k - before) /
    dilation`.
    """
    if stride > 1 and dilation > 1:
        raise ValueError(f"stride {stride} and dilation {dilation} cannot be combined along one axis")
    out, before = _length(length, taps, stride, padding, dilation), padding[0]
    found = []
    for first in range(min(dilation, out)):
        tap = (before - first) % dilation
        source = (first + tap - before) // dilation
        found.append(_Along(first, -(-(out - first) // dilation), source, range(tap, taps, dilation)))
    return found


def _zeros_around(phases: Sequence[_Along], length: int, stride: int) -> Pair:
    """Returns the padding read before and after an image along one axis."""
    read = [phase for phase in phases if len(phase.taps)]
    before = max([0, *(-phase.source for phase in read)])
    ends = (phase.source + (phase.count - 1) * stride + len(phase.taps) for phase in read)
    return before, max([0, *(end - length for end in ends)])


def kernel_gradient_plan(
    image: Sequence[int], gradient: Sequence[int], *, strides: Sequence[int], before: Pair, kernel: Pair
) -> KernelGradientPlan:
    """Plans the gradient of a kernel with rows and columns `kernel`, from the shapes of image and gradient.

    `before` are the zeros before the rows and the columns of the image.
    """
    axes = zip(image[1:3], gradient[1:3], strides, before, kernel, strict=True)
    padding = [
        (first, max(0, (places - 1) * stride + taps - first - length))
        for length, places, stride, first, taps in axes
    ]
    return KernelGradientPlan(
        batch=image[0],
        image=(image[1], image[2], image[3]),
        padding=(padding[0], padding[1]),
        gradient=(gradient[1], gradient[2], gradient[3]),
        strides=(strides[0], strides[1]),
        kernel=kernel,
    )
