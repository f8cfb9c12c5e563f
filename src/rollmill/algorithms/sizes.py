"""Checks the sizes of a run, such as minibatches, and suggests sizes that fit."""

from collections.abc import Mapping
from typing import Any

from rollmill.core.errors import UsageError

MAX_ITERATIONS = 2**31 - 1
"""Maximum number of iterations of a run, which are counted in 32 bits."""


def check_positive(sizes: Mapping[str, int]) -> None:
    """Raises a `UsageError` if one of a run's sizes is less than 1."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}={size} must be at least 1.")


def check_config_sizes(config: Any) -> None:
    """Raises a `UsageError` if `total_timesteps`, `num_envs` or `num_steps` of a configuration is less than 1.

    Registered algorithms use these names, too, but need not limit their values.
    """
    sizes = {name: getattr(config, name, None) for name in ("total_timesteps", "num_envs", "num_steps")}
    check_positive({name: size for name, size in sizes.items() if isinstance(size, int)})


def steps_each(config: Any) -> int:
    """Returns the number of steps that each environment makes in the whole run."""
    each_iteration = max(config.num_envs * config.num_steps, 1)
    return max(-(-config.total_timesteps // each_iteration), 1) * config.num_steps


def iterations_for(total_timesteps: int, num_envs: int, num_steps: int) -> int:
    """Returns the number of iterations for at least `total_timesteps` environment steps.

    Raises a `UsageError` if one iteration makes more steps than the whole run, or if there are more iterations
    than the counter can hold.
    """
    batch = num_envs * num_steps
    if total_timesteps < batch:
        raise UsageError(
            f"total_timesteps={total_timesteps} is less than one iteration of num_envs x num_steps = {num_envs} "
            f"x {num_steps} = {batch} steps. hint: raise total_timesteps to {batch} or more, or lower num_envs "
            "or num_steps."
        )
    iterations = -(-total_timesteps // batch)
    if iterations > MAX_ITERATIONS:
        raise UsageError(
            f"total_timesteps={total_timesteps} gives {iterations} iterations of num_envs x num_steps = "
            f"{num_envs} x {num_steps} = {batch} steps, more than the limit of {MAX_ITERATIONS}. hint: use "
            f"total_timesteps={MAX_ITERATIONS * batch} or less, or larger num_envs or num_steps."
        )
    return iterations


def check_shards(num_shards: int, num_envs: int, rows_per_env: int, num_minibatches: int) -> None:
    """Checks that all shards have equal sizes, and that each divides evenly into an epoch's minibatches.

    Each environment contributes `rows_per_env` samples or sequences to a batch. Raises a `UsageError` if sizes do
    not divide evenly.
    """
    check_positive({"num_shards": num_shards})
    if num_envs % num_shards:
        raise UsageError(f"num_shards={num_shards} does not divide num_envs={num_envs}.")
    rows = num_envs // num_shards * rows_per_env
    if rows % num_minibatches:
        raise UsageError(
            f"a shard has {rows} rows (num_envs={num_envs} / num_shards={num_shards} x {rows_per_env}), which "
            f"cannot be divided into num_minibatches={num_minibatches}. hint: leave num_shards out, and "
            "Rollmill chooses it."
        )
