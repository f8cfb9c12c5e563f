"""Chooses the physics engine of a robot task by short training runs: `rollmill.physics` or MuJoCo Warp."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.core.machine import visible_gpus
from rollmill.plan_search.finding import UNSEARCHED, check_stop
from rollmill.plan_search.process import START_SECONDS, CandidateProcess
from rollmill.plan_search.search.searching import CannotRun, OutOfTime
from rollmill.record.signals import stop_on_signals
from rollmill.training.request import TrainingRequest, with_types

OPTION, AUTO = "physics", "auto"
OWN, WARP = "jax", "warp"
"""The physics to choose between. Both compute on GPUs."""

MIN_GAIN = 1.05
"""Minimum speed of MuJoCo Warp, relative to the other physics, from which it is chosen."""

Measure: TypeAlias = Callable[[TrainingRequest, float | None], float]
"""Returns the environment steps per second of a training run, which may stop early below the given speed."""


def leaves_physics_open(request: TrainingRequest) -> bool:
    """Returns whether a request leaves the physics of a robot task to a measurement."""
    return request.environment.startswith("robots:") and request.environment_options.get(OPTION) == AUTO


def with_fastest_physics(
    request: TrainingRequest, *, measure: Measure, say: Callable[[str], None]
) -> TrainingRequest:
    """Returns a request with the physics with which it trains fastest, so that the run records them.

    Args:
        request: a request that leaves the physics open.
        measure: trains briefly, and returns the speed.
        say: is called with a line for each measurement, and one for the choice.

    Raises:
        UsageError: the request would resume a run, or neither of the physics can train it.
    """
    if request.settings.get("resume_if_exists"):
        raise UsageError(
            "physics=auto cannot be combined with resume_if_exists, because a restarted job could choose other "
            "physics than its run has. hint: give physics=jax or physics=warp."
        )
    if (reason := _without_choice()) is not None:
        say(f"physics={OWN}, because {reason}")
        return _with(request, OWN)
    rates: dict[str, float] = {}
    reasons = []
    for physics in (OWN, WARP):
        try:
            rates[physics] = measure(_with(request, physics), max(rates.values(), default=None))
        except (CannotRun, OutOfTime) as error:
            reasons.append(f"physics={physics}: {error or f'no iteration within {START_SECONDS:.0f} s'}")
            say(reasons[-1])
        else:
            say(f"physics={physics}: {rates[physics]:,.0f} steps/s in a short training run")
    if not rates:
        raise UsageError(f"no physics could train {request.environment}: {'; '.join(reasons)}")
    gain = rates.get(WARP, 0.0) / rates[OWN] if OWN in rates else math.inf
    chosen = WARP if gain >= MIN_GAIN else OWN
    say(f"chosen: physics={chosen}, which the run records")
    return _with(request, chosen)


def train_briefly(request: TrainingRequest, bound: float | None, *, stop: Callable[[], None]) -> float:
    """Trains a request for a few seconds in a separate process, and returns its environment steps per second.

    Training stops early if it cannot reach `bound`. `stop` raises an exception after a signal. Raises `CannotRun`
    if training ended with an error, and `OutOfTime` if it made no progress.
    """
    process = CandidateProcess(check_stop=stop, environment=dict(os.environ))
    try:
        process.prepare(request.without(UNSEARCHED))
        process.ask(None, "program", seconds=START_SECONDS)
        first = getattr(with_types(request).config, "learning_starts", 0)
        seeds = request.options.num_seeds
        found = process.measure(bound=bound, seconds=START_SECONDS, seeds=seeds, learns_from=first)
        return found.steps_per_second
    finally:
        process.close()


def choose_physics(request: TrainingRequest, say: Callable[[str], None]) -> TrainingRequest:
    """Returns a request with the physics engine that is fastest in short training runs on this machine.

    Raises the errors of `with_fastest_physics`, and `SearchStopped` after a signal.
    """
    with stop_on_signals() as stopped:
        measure = partial(train_briefly, stop=partial(check_stop, stopped))
        return with_fastest_physics(request, measure=measure, say=say)


def _without_choice() -> str | None:
    """Returns the reason why this machine offers no choice, or None."""
    if not visible_gpus() or os.environ.get("JAX_PLATFORMS") == "cpu":
        return "MuJoCo Warp is fast only on GPUs, and this machine has none that JAX may use"
    if find_spec("mujoco_warp") is None:
        return f"MuJoCo Warp is not installed: {install_command('warp')}"
    return None


def _with(request: TrainingRequest, physics: str) -> TrainingRequest:
    return replace(request, environment_options={**request.environment_options, OPTION: physics})
