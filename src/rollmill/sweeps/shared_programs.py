"""Finds trials that can share a program, since they differ only in seeds and numeric hyperparameters."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

from rollmill.algorithms.hyperparameters import static_fields
from rollmill.core.bounds import scheduled_fields
from rollmill.core.errors import UsageError
from rollmill.core.schedules import parse_schedule
from rollmill.core.types import Environment, HostEnvironment
from rollmill.envs import is_on_host, make
from rollmill.gpus.memory_limit import limited_gpu_memory
from rollmill.hooks.tracking import ONE_OF_A_PROCESS
from rollmill.runs.algorithms import ALGORITHMS, find_algorithm
from rollmill.runs.options import RunOptions
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.spec import Trial
from rollmill.training.request import ResolvedRequest, TrainingRequest, with_types

Together: TypeAlias = Literal["auto", "off"]
"""Policy for sharing programs between trials: `auto` or `off`."""

MAX_TRIALS = 32
"""Maximum number of trials in one program. More trials are divided among several programs."""

LOOKED_AT = 1024
"""Maximum number of waiting trials that are examined to count programs."""


def trials_together(
    sweep: SweepDirectory, waiting: Sequence[Trial], alone: Collection[str], *, places: int, most: int = MAX_TRIALS
) -> list[Trial]:
    """Returns the trials that can start now in one program, including the first waiting trial, or an empty list.

    Trials named in `alone` need their own program, because a program that they shared has failed. Trials are
    divided among the `places` free parts of the machine, at most `most` to each.
    """
    if not waiting or not _is_fresh(sweep, waiting[0], alone) or not _may_share(waiting[0]):
        return []
    constants = _constants(waiting[0])
    found = (trial for trial in waiting if _is_fresh(sweep, trial, alone) and _constants(trial) == constants)
    alike = list(islice(found, most * places))  # more trials could not start now
    count = math.ceil(len(alike) / places)
    return alike[:count] if count > 1 else []


def num_programs(sweep: SweepDirectory, waiting: Sequence[Trial], alone: Collection[str]) -> int:
    """Returns the minimum number of programs for the waiting trials. See `trials_together` for `alone`."""
    looked_at = waiting[:LOOKED_AT]
    shared = [trial for trial in looked_at if _is_fresh(sweep, trial, alone) and _may_share(trial)]
    alike = Counter(repr(_constants(trial)) for trial in shared)
    programs = sum(math.ceil(count / MAX_TRIALS) for count in alike.values())
    return len(waiting) - len(shared) + programs


def check_one_program(trials: Sequence[Trial]) -> None:
    """Raises a `UsageError` unless all of these trials can share one program."""
    if len(trials) > MAX_TRIALS:
        raise UsageError(f"{len(trials)} trials are more than the limit of {MAX_TRIALS} for one program.")
    first = _constants(trials[0])
    for trial in trials:
        if needs_own_process(with_types(trial.request).options):
            raise UsageError(
                f"--track {' '.join(ONE_OF_A_PROCESS)} needs a separate process for each trial of a sweep."
            )
        if not _may_share(trial) or _constants(trial) != first:
            raise UsageError(
                f"trials {trials[0]} and {trial} cannot share a program: they may differ only in seeds, in "
                "numbers of the environment, and in hyperparameters that the program does not contain "
                "(docs/sweeps.md)."
            )


def _is_fresh(sweep: SweepDirectory, trial: Trial, alone: Collection[str]) -> bool:
    """Returns whether a trial has not begun. A trial that has begun continues in a separate program."""
    return trial.name not in alone and not sweep.has_begun(trial)


def _may_share(trial: Trial) -> bool:
    """Returns whether a trial may share a program at all."""
    options = with_types(trial.request).options
    first = options.start_from or options.clone or options.pool_from
    own = (options.evaluate_every, options.stop_at_return, first, needs_own_process(options))
    return options.num_seeds == 1 and not any(own) and not is_on_host(trial.request.environment)


def needs_own_process(options: RunOptions) -> bool:
    """Returns whether a run has a tracker that requires a separate process for each run."""
    return any(name in ONE_OF_A_PROCESS for name in options.track)


def _constants(trial: Trial) -> tuple[Any, ...]:
    """Returns what has to be equal in trials that share a program."""
    resolved = with_types(trial.request)
    request, held = trial.request, _held_by_learner(resolved)
    names = [name for name in request.settings if held is None or name in held]
    shapes = {name: shape for name in names if (shape := _shape(resolved.config, name)) is not None}
    settings = {name: value for name, value in request.settings.items() if name not in shapes.keys() | {"seed"}}
    numbers = _environment_numbers(request)
    options = {name: value for name, value in request.environment_options.items() if name not in numbers}
    return request.algorithm, request.environment, settings, shapes, numbers, options


def _held_by_learner(resolved: ResolvedRequest) -> Collection[str] | None:
    """Returns the hyperparameters that the learner of the user's own algorithm holds as data.

    Returns None for a built-in algorithm, where `static_fields` are the others, and if the graph cannot be built,
    which the trials will report.
    """
    request = resolved.request
    if ALGORITHMS.is_built_in(request.algorithm):
        return None
    algorithm = find_algorithm(request.algorithm)
    key = (algorithm, request.environment, repr(sorted(request.environment_options.items())))
    if key not in _held:
        try:
            with limited_gpu_memory():
                _held[key] = frozenset(resolved.graph().hyperparameters)
        except Exception:  # the user's algorithm may raise anything
            _held[key] = None
    return _held[key]


_held: dict[tuple[Any, ...], frozenset[str] | None] = {}
"""Results of `_held_by_learner`, by algorithm and environment."""


def _shape(config: Any, name: str) -> str | None:
    """Returns the shape of a hyperparameter's schedule, or None for a compiled constant."""
    value = getattr(config, name, None)
    if name in static_fields(config):
        return None
    if isinstance(value, float):
        return "number" if math.isfinite(value) else None
    if isinstance(value, str) and name in scheduled_fields(type(config)):
        return parse_schedule(name, value).shape
    return None


def _environment_numbers(request: TrainingRequest) -> dict[str, str]:
    """Returns the schedule shapes of the environment options that are program inputs."""
    values = request.environment_options.values()
    if not any(isinstance(value, int | float | str) for value in values):
        return {}
    env = made_environment(request.environment, request.environment_options)
    return {name: course.shape for name, course in getattr(env, "inputs", {}).items()}


def made_environment(name: str, options: Mapping[str, Any]) -> Environment | HostEnvironment | None:
    """Creates an environment of trials before they start.

    Returns None for environments of adapters, which may be slow to create, and if the creation fails, which the
    trials will report.
    """
    if ":" in name:
        return None
    try:
        return make(name, **options)
    except Exception:  # the factory may raise anything
        return None
