"""Counts how often the same environment fails in a row."""

from collections.abc import Sequence

import numpy as np

from rollmill.core.errors import EnvironmentFailed
from rollmill.core.types import HostFailure


class FailureStreaks:
    """Counts the failures of each environment since its last whole episode, one that ended without a failure.

    Args:
        index: numbers of the environments among those of the whole training.
        max_failures: number of failures of one environment that the training survives; one more ends it.
    """

    def __init__(self, index: Sequence[int], max_failures: int) -> None:
        self._streaks = dict.fromkeys(map(int, index), 0)
        self._max_failures = max_failures

    def count(self, failures: Sequence[HostFailure], done: np.ndarray | None) -> None:
        """Takes in what happened in one step, or in the first reset.

        Args:
            failures: in order.
            done: whose episodes ended, `[n]`, those that failed in their step included; None for a reset.

        Raises:
            EnvironmentFailed: an environment failed too many times in a row.
        """
        if done is not None and done.any():
            cut = {failure.index for failure in failures if failure.doing == "step"}
            for number, ended in zip(self._streaks, done, strict=True):
                if ended and number not in cut:
                    self._streaks[number] = 0
        for failure in failures:
            self._streaks[failure.index] += 1
            if self._streaks[failure.index] > self._max_failures:
                raise _too_often(failure, self._streaks[failure.index])


def _too_often(failure: HostFailure, count: int) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"environment {failure.index} failed {count} times with no whole episode in between, the last time in its "
        f"{failure.doing}: {failure.error}\n  at {failure.line}\n"
        f"hint: mend the environment, or allow more failures in a row with --max-failures (now {count - 1})."
    )
