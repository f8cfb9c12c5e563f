"""Seeds of host environments: determined by an environment's global index, not by the process."""

import numpy as np

NUM_SEEDS = 2**31
"""Upper bound of seeds: environments in C++ take signed 32-bit integers."""


EVALUATION = 2**32
"""Generation of environments that a policy is evaluated in, which no start in a training has."""


def environment_seed(root: int, index: int, *, generation: int = 0, attempt: int = 0) -> int:
    """The seed of one environment.

    Environments with the same `root`, `generation` and `attempt` have different seeds.

    Args:
        root: seed of the training, at least 0.
        index: global index of the environment.
        generation: number of the start of its process, or `EVALUATION`.
        attempt: number of times that it was replaced in that process.
    """
    base = np.random.SeedSequence((root, generation, attempt)).generate_state(1)
    return (int(base[0]) + index) % NUM_SEEDS
