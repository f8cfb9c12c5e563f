"""Seeds of host environments: they belong to an environment's number, never to a process."""

import numpy as np

NUM_SEEDS = 2**31
"""Seeds are below this: environments in C++ take 32-bit integers with a sign."""


def environment_seed(root: int, index: int, *, generation: int = 0, attempt: int = 0) -> int:
    """The seed of one environment.

    Environments of the same `root`, `generation` and `attempt` never share one.

    Args:
        root: seed of the whole training, at least 0.
        index: the environment's number among those of the whole training.
        generation: how many times the process that it lives in was started before.
        attempt: how many times the environment was made anew in that process.
    """
    base = np.random.SeedSequence((root, generation, attempt)).generate_state(1)
    return (int(base[0]) + index) % NUM_SEEDS
