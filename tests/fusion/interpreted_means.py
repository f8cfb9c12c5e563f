"""Computes the means of partial sums as a GPU's kernel by Triton's interpreter: the difference from NumPy's."""

import sys
from pathlib import Path

import numpy as np
from interpreted import interpreted

from rollmill.fusion.backends.triton.means import means_kernel

PROGRAMS, SIZE, SAMPLES = 150, 75, 640


def main():
    sums = np.random.default_rng(0).standard_normal((PROGRAMS, SIZE)).astype(np.float32)
    (means,) = interpreted(means_kernel((PROGRAMS, SIZE), SAMPLES), [sums], Path(sys.argv[1]))
    print(float(np.abs(means - sums.sum(0) / SAMPLES).max() / np.abs(means).max()))


if __name__ == "__main__":
    main()
