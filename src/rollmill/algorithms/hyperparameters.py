"""Stores hyperparameters as data in the learner, so that changing one needs no compilation.

A compiled program reads them from the training state, as it reads weights. A number with a schedule is stored as
its two ends. Its value follows from the number of updates at the beginning of an iteration, and is used for all
updates of the iteration. Programs contain only values that determine shapes or code: sizes and counts, switches,
None, an infinite bound, the shape of a schedule, and a learning rate given as a function. The network settings
matter only at the start.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.core.bounds import scheduled_fields
from rollmill.core.schedules import NumberSchedule, parse_schedule
from rollmill.dataflow import Hyperparameters, Metrics

Number: TypeAlias = float | int | Float[Array | np.ndarray, ""]
"""A Python number, or a number held by a learner, which may be traced."""

PLANNED_UPDATES = "planned_updates"
"""Name of the number of updates of the whole run, over which schedules extend."""

LOOP_FIELDS = ("target_kl",)
"""Hyperparameters that end learning in an iteration early. They are constants in compiled programs."""

REWARD_FIELDS = ("gamma",)
"""Hyperparameters that affect the normalisation of rewards. They are constants in compiled programs."""

OPTIMISER_FIELDS = ("learning_rate", "critic_learning_rate")
"""Hyperparameters whose schedules the optimiser evaluates, using its own count of updates."""

SCHEDULES = "schedules/"
"""Prefix of the metrics that report the current values of scheduled hyperparameters."""


def static_fields(config: object) -> frozenset[str]:
    """Returns the numeric hyperparameters that are compiled into programs.

    The algorithm reads these hyperparameters without a learner, for example in its policy.
    """
    of_rewards = REWARD_FIELDS if getattr(config, "normalize_rewards", False) else ()
    return frozenset((*LOOP_FIELDS, *of_rewards, *getattr(config, "STATIC_FIELDS", ())))


def numbers_of(config: object, **further: float | int) -> dict[str, float]:
    """Returns the hyperparameters that are data: the finite floats of a configuration, by name.

    Hyperparameters in `static_fields` are left out. `further` are derived hyperparameters.
    """
    numbers: dict[str, float] = {}
    constant = static_fields(config)
    for name in (field.name for field in fields(config) if field.name not in constant):  # type: ignore[arg-type]
        value = getattr(config, name)
        if isinstance(value, float) and math.isfinite(value):
            numbers[name] = value
        elif (schedule := configured_schedule(config, name)) is not None:
            numbers[name] = schedule.first
            if schedule.shape != "constant":
                numbers[f"{name}:{schedule.shape}"] = schedule.last
    return {**numbers, **{name: float(value) for name, value in further.items()}}


def numbers_for(held: Mapping[str, float], config: object, other: object) -> dict[str, float] | None:
    """Returns a learner's hyperparameters for another configuration, if its programs are the same.

    Args:
        held: hyperparameters for `config`.
        config: dataclass of the hyperparameters.
        other: hyperparameters with other values.

    Returns:
        The hyperparameters for `other`, or None if the two configurations need different programs.
    """
    ours, theirs = numbers_of(config), numbers_of(other)
    differ = differing(config, other)
    if type(config) is not type(other) or ours.keys() != theirs.keys() or differ - held.keys():
        return None
    if any(type(getattr(config, name)) is not type(getattr(other, name)) for name in differ):
        return None  # a number and a schedule need different programs
    return {name: theirs.get(name, number) for name, number in held.items()}


def differing(config: Any, other: Any) -> set[str]:
    """Returns the names of differing fields of two configurations."""
    return {field.name for field in fields(config) if getattr(config, field.name) != getattr(other, field.name)}


def as_data(numbers: Mapping[str, float]) -> Hyperparameters:
    """Converts hyperparameters to arrays for a learner."""
    return {name: jnp.float32(value) for name, value in numbers.items()}


def configured_schedule(config: object, name: str, held: Mapping[str, Any] | None = None) -> NumberSchedule | None:
    """Returns the schedule of a hyperparameter, or None for a number.

    Args:
        config: dataclass of the hyperparameters.
        name: name of the hyperparameter.
        held: hyperparameters held by a learner. They replace the ends of the schedule.
    """
    text, held = getattr(config, name), held or {}
    if not isinstance(text, str) or name not in scheduled_fields(type(config)):
        return None
    shape, first, last = parse_schedule(name, text)
    first = held.get(name, first)
    return NumberSchedule(shape, first, held.get(f"{name}:{shape}", first if shape == "constant" else last))


def scheduled_in(numbers: Mapping[str, Any]) -> Iterator[tuple[str, NumberSchedule]]:
    """Yields the name and schedule of each hyperparameter whose schedule follows a learner's updates."""
    for key, last in numbers.items():
        name, colon, shape = key.partition(":")
        if colon and name not in OPTIMISER_FIELDS:
            yield name, NumberSchedule(shape, numbers[name], last)


class EvaluatedHyperparameters(dict[str, Any]):
    """Hyperparameters of a learner within one iteration, with schedules evaluated at its beginning."""


jax.tree_util.register_pytree_with_keys(
    EvaluatedHyperparameters,
    lambda held: ([(jax.tree_util.DictKey(name), held[name]) for name in sorted(held)], tuple(sorted(held))),
    lambda names, values: EvaluatedHyperparameters(zip(names, values, strict=True)),
)


def with_evaluated_schedules(learner: Any) -> Any:
    """Returns the learner with its schedules evaluated, for all updates of one iteration.

    The result has the same leaves, so it can replace the learner.
    """
    if _is_settled(learner):
        return learner
    return replace(learner, hyperparameters=EvaluatedHyperparameters(current_hyperparameters(learner)))


def schedule_evaluator(numbers: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Returns `Graph.evaluate_schedules` for a learner with these hyperparameters, or None without schedules."""
    return with_evaluated_schedules if follows_schedules(numbers) else None


def _is_settled(learner: Any) -> bool:
    return isinstance(learner.hyperparameters, EvaluatedHyperparameters)


def follows_schedules(numbers: Mapping[str, Any]) -> bool:
    """Returns whether hyperparameters other than learning rates change with a learner's updates."""
    return any(True for _ in scheduled_in(numbers))


def current_hyperparameters(learner: Any) -> Hyperparameters:
    """Returns a learner's hyperparameters, with schedules evaluated.

    The learner must have the field `hyperparameters` and, if there are schedules, `updates_done`.
    """
    held = learner.hyperparameters
    if _is_settled(learner):
        return dict(held)
    return {**held, **{name: schedule.at(_share_done(learner)) for name, schedule in scheduled_in(held)}}


def schedule_metrics(learner: Any) -> Metrics:
    """Returns the current values of scheduled hyperparameters as metrics."""
    schedules = scheduled_in(getattr(learner, "hyperparameters", {}))
    return {SCHEDULES + name: schedule.at(_share_done(learner)) for name, schedule in schedules}


def current_config(config: Any, hyperparameters: Hyperparameters) -> Any:
    """Returns the configuration with the hyperparameters held by a learner.

    `current_config(config, current_hyperparameters(learner)).gamma` is read like `config.gamma`. The copy is not
    validated again, because its values may be traced.
    """
    named = {field.name for field in fields(config)}
    now = copy.copy(config)
    for name in hyperparameters.keys() & named:
        object.__setattr__(now, name, hyperparameters[name])
    return now


def _share_done(learner: Any) -> Float[Array, ""]:
    return learner.updates_done / learner.hyperparameters[PLANNED_UPDATES]
