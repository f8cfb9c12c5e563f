"""The results by which the trials of a sweep are compared, which are columns of its table and come from the
summaries of runs.

`returns/KIND` is the mean return of one agent kind. If kinds have opposing goals, their returns cancel out, so the
mean over all agents, `final_return`, says little.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from rollmill.core.errors import UsageError, nearest_names, suggestion
from rollmill.record.metric_curves import RETURN
from rollmill.record.status import RETURNS

TrialResult: TypeAlias = Literal["final_return", "best_return", "env_steps", "steps_per_second", "seconds"]
"""Name of a result column that every sweep has."""
TRIAL_RESULTS: tuple[TrialResult, ...] = get_args(TrialResult)
MAY_DIFFER = frozenset({"algorithm", "environment"})
"""Options by which trials may differ in their kinds of agents."""
KIND_RETURNS = "final_returns"
"""Field of a summary with the mean return of each agent kind."""


def check_metric(metric: object) -> str:
    """Returns the name of a result. Raises a `UsageError` if sweeps have no such result.

    `check_kind` checks whether the environment has a named agent kind.
    """
    if isinstance(metric, str) and (metric in TRIAL_RESULTS or (is_of_kind(metric) and metric != RETURNS)):
        return metric
    near = nearest_names(str(metric), TRIAL_RESULTS)
    meant = f"{suggestion(str(metric), near)} " if near else ""
    raise UsageError(
        f"unknown metric {str(metric)!r}. {meant}Known: {', '.join(TRIAL_RESULTS)} and {RETURNS}KIND, where KIND "
        "is a kind of agents."
    )


def check_kind(metric: str, kinds: Sequence[str]) -> None:
    """Raises a `UsageError` if a metric is the return of an agent kind, and trials have only one or other kinds.

    `kinds` are the names of the kinds in a trial.
    """
    if not is_of_kind(metric) or (len(kinds) > 1 and metric.removeprefix(RETURNS) in kinds):
        return
    if len(kinds) < 2:
        raise UsageError(
            f"--metric {metric} needs several kinds of agents, but the trials have one. hint: start a new sweep "
            f"with --metric {TRIAL_RESULTS[0]}."
        )
    known = ", ".join(f"{RETURNS}{kind}" for kind in kinds)
    raise UsageError(
        f"the trials have no metric {metric!r}, only {known}. hint: start a new sweep with one of these."
    )


def is_of_kind(metric: str) -> bool:
    """Returns whether a result is the mean return of one agent kind."""
    return metric.startswith(RETURNS)


def curve_of(metric: str) -> str:
    """Returns the metric of a run that corresponds to a result. Early stopping and the drawn curves use it."""
    return metric if is_of_kind(metric) else RETURN


def result_of(summary: Mapping[str, Any], metric: str) -> int | float | None:
    """Returns a result from the summary of a run, or None if the summary does not contain it."""
    if not is_of_kind(metric):
        return finite(summary.get(metric))
    of_kinds = summary.get(KIND_RETURNS)
    return finite(of_kinds.get(metric.removeprefix(RETURNS))) if isinstance(of_kinds, dict) else None


def columns_of_kinds(summaries: Iterable[Mapping[str, Any]], metric: str) -> list[str]:
    """Returns the names of all columns with returns of agent kinds: the kinds in any summary, and `metric`."""
    known = (summary.get(KIND_RETURNS) for summary in summaries)
    names = {f"{RETURNS}{kind}" for of_kinds in known if isinstance(of_kinds, dict) for kind in of_kinds}
    return sorted(names | ({metric} if is_of_kind(metric) else set()))


def extra_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the columns with returns of agent kinds that occur in the rows of a table."""
    return [name for name in rows[0] if name.startswith(RETURNS)] if rows else []


def lacking(summary: Mapping[str, Any], metric: str) -> str | None:
    """Returns a note for the user if a run has ended without the return of the agent kind that `metric` names."""
    if not is_of_kind(metric) or not summary or result_of(summary, metric) is not None:
        return None
    of_kinds = summary.get(KIND_RETURNS)
    known = ", ".join(f"{RETURNS}{kind}" for kind in of_kinds) if isinstance(of_kinds, dict) else ""
    has = f"only {known}" if known else "because no episode ended, or it has one kind of agent"
    return f"has no {metric}, {has}. hint: rollmill sweep --resume SWEEP --metric NAME ranks by another result"


def finite(value: Any) -> int | float | None:
    """Returns a finite number from a summary, or None for any other value."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None
