"""Bootstrap confidence intervals of means over few samples.

Shape letters: `N` samples, `P` points of each.
"""

import numpy as np
from jaxtyping import Float

RESAMPLES = 1000
CONFIDENCE = 0.95
MAX_OF_RANGE = 3
"""Number of values up to which the interval equals their range, since each extreme makes up more than 2.5 % of the
resampled means."""


def bootstrap_interval(
    values: Float[np.ndarray, "N P"],
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Returns the lower and upper end of the 95 % bootstrap confidence interval for the mean over `N`.

    The resamples are always the same, so equal values have equal intervals.
    """
    number = len(values)
    if number <= MAX_OF_RANGE:
        return values.min(0), values.max(0)
    counts = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), size=RESAMPLES)
    means = counts @ values / number
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high
