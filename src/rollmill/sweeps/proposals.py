"""Proposes values for the next trial of a sweep with an Optuna sampler, based on the results so far.

A proposal depends only on the axes, the trials so far and a seed. The sampler is created again for each proposal,
so only values and results are stored. Samplers that have their own state are therefore not supported.
"""

import contextlib
import importlib
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.sweeps.search_space import Axis, points, round_within_range

SAMPLERS = ("tpe", "multivariate-tpe")
"""Names of the supported Optuna samplers, which use separate or joint tree-structured Parzen estimators."""
MAX_ATTEMPTS = 20
"""How often a sampler is asked again if it proposes values that have already been tried."""


class PastTrial(NamedTuple):
    """An earlier trial of a sweep, in the form that samplers need."""

    point: dict[str, Any]
    state: Literal["finished", "stopped", "running", "failed"]
    result: float | None = None
    """Value of the metric to maximise, or None if it is not known yet."""
    steps: int = 0
    """Number of environment steps after which the result was measured."""


def check_sampler(name: str) -> None:
    """Raises a `UsageError` if a sampler is unknown, or needs Optuna and Optuna is not installed."""
    if name not in SAMPLERS:
        raise UsageError(f"unknown sampler {name!r}. Known: grid, random, {', '.join(SAMPLERS)}.")
    _optuna()


def propose(axes: Sequence[Axis], trials: Sequence[PastTrial], *, sampler: str, seed: int) -> dict[str, Any]:
    """Proposes the values of the next trial. Equal arguments give equal values.

    The proposal depends on all trials so far, in the order in which they were proposed. Values that have been
    tried are not proposed again as long as others remain. Raises a `UsageError` if Optuna is not installed.
    """
    tried = [trial.point for trial in trials]
    for attempt in range(MAX_ATTEMPTS):
        source = random.Random(f"{seed} {len(trials)} {attempt}")
        point = _ask(axes, trials, _sampler(sampler, source.getrandbits(32)))
        if point not in tried:
            return point
    if all(axis.values for axis in axes):
        return next((point for point in points(axes) if point not in tried), tried[0])
    return points(axes, draws=1, seed=seed + len(trials))[0]


def _ask(axes: Sequence[Axis], trials: Sequence[PastTrial], sampler: Any) -> dict[str, Any]:
    optuna = _optuna()
    distributions = {axis.option: _distribution(axis) for axis in axes}
    with _quietly():
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in trials:
            values = {axis.option: _value(axis, trial.point[axis.option]) for axis in axes}
            study.add_trial(
                optuna.trial.create_trial(params=values, distributions=distributions, **_outcome(trial))
            )
        asked = study.ask(distributions).params
    return {axis.option: _convert_proposal(axis, asked[axis.option]) for axis in axes}


def _distribution(axis: Axis) -> Any:
    kinds = _optuna().distributions
    if not axis.values:
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.logarithmic)
    if axis.integers:
        return kinds.IntDistribution(*axis.integers)
    return kinds.CategoricalDistribution(tuple(map(repr, axis.choices)))


def _value(axis: Axis, value: Any) -> str | int | float:
    """Converts a value of a point to Optuna. Choices are given by name, because Optuna does not support lists."""
    if not axis.values:
        return min(max(float(value), axis.low), axis.high)
    return value if axis.integers else repr(value)


def _convert_proposal(axis: Axis, value: str | int | float) -> Any:
    if not axis.values:
        return round_within_range(axis, float(value))
    return value if axis.integers else next(choice for choice in axis.choices if repr(choice) == value)


def _outcome(trial: PastTrial) -> dict[str, Any]:
    """Returns the Optuna record of a trial. A stopped trial counts as worse than all finished trials."""
    states = _optuna().trial.TrialState
    known = trial.result is not None and math.isfinite(trial.result)
    if trial.state == "finished" and known:
        return {"state": states.COMPLETE, "value": trial.result}
    if trial.state == "stopped" and known:
        return {"state": states.PRUNED, "intermediate_values": {trial.steps: trial.result}}
    return {"state": states.RUNNING if trial.state == "running" else states.FAIL}


def _sampler(name: str, seed: int) -> Any:
    samplers = _optuna().samplers
    with _quietly():
        return samplers.TPESampler(seed=seed, constant_liar=True, multivariate=name == "multivariate-tpe")


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise UsageError(f"samplers need Optuna, which is not installed: {install_command('optuna')}.") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences Optuna: its lines on each study, and its warnings about experimental functions."""
    logging = _optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(before)
