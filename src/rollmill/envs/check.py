"""Checks the contract of an environment before an algorithm trains on it (`check_environment`)."""

import warnings

import numpy as np

from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment
from rollmill.envs.box_coverage import far_boxes
from rollmill.envs.check_host import NUM_COPIES, check_host
from rollmill.envs.check_run import (
    PlayedSteps,
    check_bounds,
    check_finite,
    check_legal_actions,
    check_no_auto_reset,
    check_planning,
    check_to_move,
    check_vmapped,
    first_end,
    rollout,
)
from rollmill.envs.check_trace import (
    check_no_callbacks,
    check_purity,
    check_types,
    warn_of_promotion,
    warn_of_weak_types,
)
from rollmill.envs.registry import as_environment
from rollmill.envs.strong_types import strongly_typed
from rollmill.gpus.jax_settings import check_jax

MORE_STEPS = 10_000
"""Further random steps in which an environment may end an episode, if it ended none before."""
TYPICAL_LIMIT = 500
"""Steps of an episode, as an example."""


def check_environment(
    env: Environment | HostEnvironment | GymnasiumObject | str, *, seed: int = 0, num_steps: int = 100
) -> None:
    """Checks that an environment satisfies the contract of `rollmill.Environment`, and prints a line if it does.

    The check first traces reset and step to examine types, structures, spaces and side effects. It then plays
    random actions, and continues for up to 10,000 further steps if no episode ends. Every step is checked for
    non-finite numbers and for observations outside their space. A host environment is checked with two copies,
    which are closed afterwards. The physics of your own robot are compared with C MuJoCo.

    Args:
        env: one environment, unbatched, without auto-reset, or an id, or a `gymnasium.Env`.
        seed: seed of random keys and actions.
        num_steps: number of random actions.

    Raises:
        ContractError: a violation, with the expected value and a hint. If the environment's own code raises an
            exception, the message also names the line.
        UsageError: `env` is not an environment.

    Warns:
        UserWarning: reset or step relies on implicit dtype promotion, or returns weakly typed values, no episode
            ended, or a Gaussian policy hardly reaches the range of the actions.

    Examples:
        >>> rollmill.check_environment("CartPole-v1")
    """
    check_jax()
    env = as_environment(env)
    _warn_of_far_actions(env)
    if isinstance(env, HostEnvironment):
        ended = check_host(env, seed=seed, num_steps=num_steps)
        hint = (
            ""
            if ended
            else (". If no episode ever ends, limit the time: gymnasium.make(..., max_episode_steps=500)")
        )
        print(
            f"{env.name} passed all checks: {num_steps} random steps of {NUM_COPIES} copies, "
            f"{_describe(ended)}{hint}."
        )
        return
    strong = strongly_typed(env)
    _check_by_tracing(strong)
    warn_of_weak_types(env)
    record = _check_by_running(strong, seed, num_steps)
    ended, more = _count_episodes(record), 0
    if not ended:
        last, more = first_end(strong, record, seed, MORE_STEPS)
        _check_steps(strong, last)
        ended = _count_episodes(last)
    if not ended:
        _warn_of_no_end(env.name, num_steps + more)
    passed = "passed all checks" if ended else "passed the checks with a warning"
    print(f"{env.name} {passed}: {num_steps + more} random steps, {_describe(ended)}.")
    if env.compare is not None:
        print(f"{env.name}: {env.compare(num_steps, seed)}")


def _describe(ended: int) -> str:
    return f"{ended} {'episode' if ended == 1 else 'episodes'} ended"


def _check_by_tracing(env: Environment) -> None:
    traced = check_types(env)
    check_no_callbacks(env, traced)
    check_purity(env, traced)
    warn_of_promotion(env, traced)


def _check_by_running(env: Environment, seed: int, num_steps: int) -> PlayedSteps:
    record = rollout(env, seed, num_steps)
    _check_steps(env, record)
    check_vmapped(env, record)
    check_planning(env, record)
    return record


def _check_steps(env: Environment, record: PlayedSteps) -> None:
    """Runs the checks of the values that steps return."""
    check_finite(env, record)
    check_bounds(env, record)
    check_legal_actions(env, record)
    check_to_move(env, record)
    check_no_auto_reset(env, record)


def _warn_of_far_actions(env: Environment | HostEnvironment) -> None:
    for far in far_boxes(env.action_space):
        warnings.warn(f"{env.name}: {far}", stacklevel=3)


def _warn_of_no_end(name: str, num_steps: int) -> None:
    warnings.warn(
        f"{name}: no episode ended in {num_steps} random steps. A run has no return before an episode ends, and "
        "an evaluation waits for one. hint: let step return terminated, or limit the number of steps, as in "
        f"rollmill.time_limit(env, {TYPICAL_LIMIT}).",
        stacklevel=3,
    )


def _count_episodes(record: PlayedSteps) -> int:
    steps = record.steps.timestep
    return int(np.sum(np.asarray(steps.terminated | steps.truncated)))
