"""Determines in how many iterations each metric was computed, so that a log line averages only over those."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from rollmill.dataflow import COMPUTED, Batch, Graph

EPOCHS = "epochs"
LOSSES = "losses/"
RETURNS = "returns/"
"""Prefix of the metrics with mean returns of agent kinds, which are 0 until the first episode has ended."""


def reported_names(graph: Graph, learner: Any) -> frozenset[str]:
    """Returns the names of metrics that an algorithm with a replay memory reports in every iteration, even before
    it learns.
    """
    if graph.replay is None or graph.report is None:
        return frozenset()
    return frozenset(jax.eval_shape(graph.report, learner, Batch(())))


def computed_shares(graph: Graph, names: Iterable[str], reported: frozenset[str]) -> dict[str, str]:
    """Maps each metric that only some iterations compute to the metric that holds the share of these iterations.

    `reported` are the names that `reported_names` returns.
    """
    known = set(names)
    of_updates = {name: COMPUTED + name for name in known if COMPUTED + name in known}
    if graph.replay is None:
        return of_updates
    learned = {name: EPOCHS for name in known if name.startswith(LOSSES) and name not in reported}
    return learned | of_updates


def defined_mean(numbers: np.ndarray) -> float | None:
    """Returns the mean of a metric over the seeds in which it is defined, or None if it is defined in none."""
    defined = [number for number in numbers.tolist() if not math.isnan(number)]
    return sum(defined) / len(defined) if defined else None
