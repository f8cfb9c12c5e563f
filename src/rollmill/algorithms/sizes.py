"""Checks of the sizes that a user hands to an algorithm, with messages that say which sizes fit."""

from collections.abc import Mapping

from rollmill.core.errors import UsageError


def check_positive(sizes: Mapping[str, int]) -> None:
    """Every named size is at least one."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}={size} must be at least 1.")


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Every named number lies in `[0, 1]`."""
    for name, fraction in fractions.items():
        if not 0 <= fraction <= 1:
            raise UsageError(f"{name}={fraction} must lie between 0 and 1.")


def iterations_for(total_timesteps: int, num_envs: int, num_steps: int) -> int:
    """Iterations that make at least `total_timesteps` environment steps."""
    batch = num_envs * num_steps
    if total_timesteps < batch:
        raise UsageError(
            f"total_timesteps={total_timesteps} is less than one iteration of num_envs x num_steps = "
            f"{num_envs} x {num_steps} = {batch}; raise it to {batch} or more, or lower num_envs or num_steps."
        )
    return -(-total_timesteps // batch)


def check_shards(num_shards: int, num_envs: int, rows_each: int, num_minibatches: int) -> None:
    """Shards are equal, and every minibatch takes the same share of each."""
    check_positive({"num_shards": num_shards})
    if num_envs % num_shards:
        raise UsageError(f"num_shards={num_shards} does not divide num_envs={num_envs}.")
    rows = num_envs // num_shards * rows_each
    if rows % num_minibatches:
        raise UsageError(
            f"a shard holds {rows} rows (num_envs={num_envs} / num_shards={num_shards} x {rows_each}), which "
            f"do not divide into num_minibatches={num_minibatches}; leave num_shards out to have one chosen."
        )
