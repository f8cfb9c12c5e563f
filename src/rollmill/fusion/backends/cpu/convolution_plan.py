"""Plans convolutions: determines which kernel weights (*taps*) meet which pixels.

Images are `[batch, rows, columns, channels]` and kernels `[rows, columns, inputs, outputs]`. The gradient of a
strided convolution with respect to its image is a convolution of an image dilated by zeros. Its result is divided
into *phases*, sets of regularly spaced positions at which the same taps meet pixels and all others meet zeros.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

Pair: TypeAlias = tuple[int, int]
"""A pair of integers, for rows and columns or for the two ends of an axis."""


class Phase(NamedTuple):
    """The output positions of a convolution that use the same kernel taps."""

    first: Pair
    """Row and column of the first output position. The others follow at distances of `ResultPlan.spread`."""
    count: Pair
    source: Pair
    """Row and column of the padded image where the sum for the first output position begins."""
    taps: tuple[range, range]
    """Rows and columns of the kernel that this phase uses."""


class ResultPlan(NamedTuple):
    """Plan for computing a convolution, which skips the zeros of a dilated image."""

    batch: int
    image: tuple[int, int, int]
    padding: tuple[Pair, Pair]
    """Numbers of zeros before and after the rows, and before and after the columns."""
    strides: Pair
    """Rows and columns of the image between consecutive output positions of a phase."""
    result: tuple[int, int, int]
    spread: Pair
    phases: tuple[Phase, ...]

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of the convolution for one image."""
        each = (phase.count[0] * phase.count[1] * len(phase.taps[0]) * len(phase.taps[1]) for phase in self.phases)
        return 2 * sum(each) * self.image[2] * self.result[2]


class KernelGradientPlan(NamedTuple):
    """Plan for computing the gradient of a convolution kernel, from the image and the gradient of the result."""

    batch: int
    image: tuple[int, int, int]
    padding: tuple[Pair, Pair]
    gradient: tuple[int, int, int]
    """Rows, columns and channels of the gradient of the convolution's result."""
    strides: Pair
    kernel: Pair
    """Rows and columns of the convolution kernel."""

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of the gradient for one image."""
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
    """Returns the plan of a convolution over an image with `dilation - 1` zeros between its pixels.

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
    """Returns the phases along one axis. At position `y`, tap `k` reads `(y * stride + k - before) / dilation`."""
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
    """Returns the plan for the gradient of a convolution kernel, given the shapes of the image and of the result's
    gradient.

    `before` is the padding before the image's rows and columns, and `kernel` the kernel's rows and columns.
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
