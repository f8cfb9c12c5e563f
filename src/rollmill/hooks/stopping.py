"""Hooks that stop a run: when it reaches a mean return, or when a metric no longer improves."""

import math
from functools import partial
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.schema import coerce
from rollmill.hooks.events import (
    Hook,
    HookRequest,
    MetricsLogged,
    PolicyEvaluated,
    Stop,
    TrainingEvent,
    TrainingRewound,
    TrainingStarted,
    name_hook,
)

WINDOW = 100
"""Maximum number of episodes that `episode/return` averages over."""

TRAINING_RETURN, EVALUATION_RETURN = "episode/return", "evaluation/return"
EVALUATION_PREFIX = "evaluation/"
"""Prefix of the metrics that only lines of evaluations contain."""


def training_return(kind: str | None = None) -> str:
    """Returns the name of the metric for the mean return of recent episodes: of all agents, or of one kind."""
    return TRAINING_RETURN if kind is None else f"episode/returns/{kind}"


def evaluation_return(kind: str | None = None) -> str:
    """Returns the name of the metric for the mean return of an evaluation: of all agents, or of one kind."""
    return EVALUATION_RETURN if kind is None else f"evaluation/returns/{kind}"


def stop_at_return(
    value: int | float, *, episodes: int = WINDOW, evaluated: bool = False, kind: str | None = None
) -> Hook:
    """Returns a hook that stops a run as soon as the mean return is at least `value`.

    Args:
        value: the mean return to reach. With several seeds, it is also averaged over the seeds.
        episodes: number of episodes, from 1 to 100, that must have ended before `episode/return` counts. This
            metric is the mean over the latest 100 episodes, or over fewer at the beginning.
        evaluated: use `evaluation/return` instead, in runs with `evaluate_every`.
        kind: kind of agents whose mean return counts, in environments with several kinds. Default: the mean over
            all agents.

    Raises:
        UsageError: `value` is not finite, or `episodes` is out of bounds. During training: the environment does
            not have several kinds of agents, or no such kind.
    """
    value, episodes = _finite("value", value), coerce("episodes", int, episodes)
    if not 1 <= episodes <= WINDOW:
        raise UsageError(f"episodes={episodes} must lie between 1 and {WINDOW}.")
    metric = evaluation_return(kind) if evaluated else training_return(kind)
    return name_hook("stop_at_return", partial(_stop_at_return, value, episodes, metric))


def _stop_at_return(value: float, episodes: int, metric: str, event: TrainingEvent) -> HookRequest:
    _check_that_it_exists("stop_at_return", metric, event)
    evaluated = metric.startswith(EVALUATION_PREFIX)
    match event:
        case MetricsLogged() if not evaluated and event.episodes >= episodes:
            reached = event.row[metric]
        case PolicyEvaluated() if evaluated:
            reached = event.row[metric]
        case _:
            return None
    if reached is None or reached < value:
        return None
    of_kind = metric.partition("returns/")[2]
    return Stop(
        f"the mean return {of_kind and f'of {of_kind} '}of {'the evaluation' if evaluated else 'training'} is "
        f"{reached:.6g}, which reaches the goal of {value:.6g}"
    )


def early_stopping(
    metric: str = EVALUATION_RETURN,
    *,
    patience: int,
    min_change: int | float = 0.0,
    smaller_is_better: bool = False,
) -> Hook:
    """Returns a hook that stops a run when a metric has not improved in the last `patience` lines that contain it.

    Args:
        metric: name of a metric, such as `evaluation/return` or `episode/return`.
        patience: number of lines of metrics.jsonl with this metric, after the best one, without an improvement.
        min_change: a change must be larger than this to count as an improvement.
        smaller_is_better: set for metrics such as losses or `episode/length`.

    Returns:
        A hook for one run. In a resumed run, it starts counting again. If the run goes back to an earlier
        iteration, because a worker was lost, later lines no longer count.

    Raises:
        UsageError: `patience` is not positive, or `min_change` is negative or not finite. During training: the run
            has no such metric.
    """
    patience, min_change = coerce("patience", int, patience), _finite("min_change", min_change)
    metric = coerce("metric", str, metric)
    if patience < 1:
        raise UsageError(f"patience={patience} must be at least 1.")
    if min_change < 0:
        raise UsageError(f"min_change={min_change} must be at least 0.")
    counts = [_Count(0, -math.inf, 0)]  # of all lines so far, because a run may go back

    def hook(event: TrainingEvent) -> HookRequest:
        _check_that_it_exists("early_stopping", metric, event)
        if isinstance(event, TrainingRewound):
            counts[1:] = [count for count in counts[1:] if count.iteration <= event.iteration]
        value = event.row.get(metric) if isinstance(event, MetricsLogged | PolicyEvaluated) else None
        if value is None:
            return None
        gain, (_, best, lines_since) = -value if smaller_is_better else value, counts[-1]
        best, lines_since = (gain, 0) if gain > best + min_change else (best, lines_since + 1)
        counts.append(_Count(event.iteration, best, lines_since))
        if lines_since < patience:
            return None
        shown = -best if smaller_is_better else best
        return Stop(f"{metric} has not improved on {shown:.6g} in {lines_since} lines")

    return name_hook("early_stopping", hook)


class _Count(NamedTuple):
    """The best value of a metric up to an iteration, and the number of lines since then."""

    iteration: int
    best: float
    lines_since: int


def _check_that_it_exists(hook: str, metric: str, event: TrainingEvent) -> None:
    """Raises a UsageError if an event shows that the run never logs the metric that a hook waits for."""
    evaluated = metric.startswith(EVALUATION_PREFIX)
    match event:
        case TrainingStarted() if evaluated and event.config["options"]["evaluate_every"] is None:
            raise UsageError(
                f"{hook} waits for {metric!r}, but the run has no evaluations. hint: pass "
                "evaluate_every, the number of environment steps between two evaluations, or use the metric "
                f"{TRAINING_RETURN!r}."
            )
        case MetricsLogged(row=row) if not evaluated and metric not in row:
            raise unknown_name("metric", metric, row)
        case PolicyEvaluated(row=row) if evaluated and metric not in row:
            raise unknown_name("metric of evaluations", metric, row)


def _finite(name: str, value: Any) -> float:
    number = coerce(name, float, value)
    if not math.isfinite(number):
        raise UsageError(f"{name}={number} must be finite.")
    return number
