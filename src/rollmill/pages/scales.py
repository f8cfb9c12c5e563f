"""Round numbers for the axes of figures."""

import math

LEAST_RANGE = 1e-300


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers in a range: multiples of 1, 2 or 5 times a power of ten."""
    if not LEAST_RANGE < high - low < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= (high - low) / 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
