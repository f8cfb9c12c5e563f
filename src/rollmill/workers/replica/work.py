"""The data that the stages of a replica pass from one to the next, and the interface of a stage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.dataflow import Trajectory, Weights
from rollmill.workers.reports import Row


class Work(NamedTuple):
    """The results of one iteration so far; each stage takes it and returns it with its own results added."""

    iteration: int
    weights: Weights | None = None
    """Those to act with; None until a stage has received or chosen them."""
    version: int = 0
    """Iterations that the weights have learned from."""
    trajectory: Trajectory | None = None
    lags: Sequence[int] | None = None
    """How many iterations old the weights of each received trajectory were."""
    metrics: Row | None = None
    """Those to report; None where another replica reports them."""


def no_arrays() -> dict[str, np.ndarray]:
    """The part of a snapshot of a stage that holds no state."""
    return {}


class StageRun(NamedTuple):
    """A stage of one replica, with its channels open and its programs ready to compile."""

    run: Callable[[Work], Work]
    part: Callable[[], Mapping[str, Any]] = no_arrays
    """The named arrays that the stage contributes to a snapshot."""
    resumed_at: Callable[[], int] | None = None
    """Where this replica takes a lost one's place: the first iteration that the lost one had not delivered."""
