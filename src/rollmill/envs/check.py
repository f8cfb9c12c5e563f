"""`check_environment`: the contract of an environment, checked before hours of training depend on it."""

from rollmill.core.errors import ContractError
from rollmill.core.types import Environment, HostEnvironment
from rollmill.envs.check_host import check_host
from rollmill.envs.check_run import (
    check_bounds,
    check_finite,
    check_legal_actions,
    check_no_auto_reset,
    check_vmapped,
    rollout,
)
from rollmill.envs.check_trace import (
    Traced,
    check_action_mask,
    check_agents,
    check_flags,
    check_info,
    check_kinds,
    check_no_callbacks,
    check_observation_space,
    check_params,
    check_purity,
    check_same_types,
    trace_environment,
    warn_of_promotion,
)


def check_environment(env: Environment | HostEnvironment, *, seed: int = 0, num_steps: int = 100) -> None:
    """Checks that an environment keeps the contract of `rollmill.Environment`.

    First what tracing alone can tell (types, structures, spaces, side effects), then a rollout of random
    actions. A `HostEnvironment` is tried as two copies, which are closed again.

    Args:
        env: one environment, unbatched, without auto-reset.
        seed: of the random keys and actions.
        num_steps: how many random actions are tried.

    Raises:
        ContractError: what was found, what was expected, and the way out; of an error that the
            environment's own code raised, also its line.

    Warns:
        UserWarning: reset or step relies on implicit dtype promotion.
    """
    if isinstance(env, HostEnvironment):
        return check_host(env, seed=seed, num_steps=num_steps)
    if not isinstance(env, Environment):
        raise ContractError(
            f"check_environment got a {type(env).__name__}, expected a rollmill Environment or "
            "HostEnvironment: make one with rollmill.envs.make or rollmill.Environment(...)."
        )
    _check_by_tracing(env)
    _check_by_running(env, seed, num_steps)
    return None


def check_types(env: Environment) -> Traced:
    """The part of `check_environment` that takes no time: what reset and step return, by type alone.

    Raises:
        ContractError: as `check_environment`.
    """
    check_params(env)
    check_kinds(env)
    traced = trace_environment(env)
    check_same_types(env, traced)
    check_flags(env, traced)
    check_agents(env, traced)
    check_info(env, traced)
    check_observation_space(env, traced)
    check_action_mask(env, traced)
    return traced


def _check_by_tracing(env: Environment) -> None:
    traced = check_types(env)
    check_no_callbacks(env, traced)
    check_purity(env, traced)
    warn_of_promotion(env, traced)


def _check_by_running(env: Environment, seed: int, num_steps: int) -> None:
    record = rollout(env, seed, num_steps)
    check_finite(env, record)
    check_bounds(env, record)
    check_legal_actions(env, record)
    check_no_auto_reset(env, record)
    check_vmapped(env, record)
