"""Resets only environments whose episode ended, which saves time if resets are expensive.

Under `jax.vmap`, both branches of a condition are computed, so a batch would reset all of its environments in
every step, although few episodes end. This module resets small groups of environments instead. One group or none
is usually enough.

Shape letters: `E` environments, `G` environments of a group.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce
from rollmill.core.types import Environment, Key, Observation, Params, State

Begun = tuple[Observation, State]
Restart = Callable[[Bool[Array, ""], Key, Params, Begun], Begun]
"""`(done, key, params, (observation, state)) -> (observation, state)` of a new episode if done, else the same."""


MAX_SELECTED = 64
"""Maximum number of elements per environment with which an array is written by a selection among old and new rows.

On GPUs, XLA joins selections into few kernels, whereas each scatter is a kernel of its own. Larger arrays are
scattered, so that only rows of finished environments are written.
"""


class _Carry(NamedTuple):
    first: Int[Array, ""]
    """Number of environments that have been restarted."""
    now: PyTree[Array]


def rare_reset(env: Environment, ratio: int) -> Restart:
    """Returns a function that starts new episodes only in environments whose episode ended.

    It computes about `E / ratio` resets a step, in groups of `ceil(E / ratio)` environments. The results equal a
    reset of all environments in every step, because the new episode of each environment follows from its own key.
    An environment that is not batched is reset under a condition.
    """

    def begin(key: Key, params: Params, like: Begun) -> Begun:
        return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), env.reset(key, params), like)

    @jax.custom_batching.custom_vmap
    def restart(done: Bool[Array, ""], key: Key, params: Params, now: Begun) -> Begun:
        return jax.lax.cond(done, lambda: begin(key, params, now), lambda: now)

    @restart.def_vmap
    def restart_batch(size: int, batched: list[Any], done: Any, key: Any, params: Params, now: Any) -> Any:
        done, key, now = (
            _broadcast(size, b, v) for b, v in zip(_without(batched, 2), (done, key, now), strict=True)
        )
        leaves, structure = jax.tree.flatten(params)
        axes = [0 if varies else None for varies in jax.tree.leaves(batched[2])]

        def begin_group(index: Int[Array, " G"]) -> Begun:
            picked = [leaf if axis is None else leaf[index] for leaf, axis in zip(leaves, axes, strict=True)]
            like = jax.tree.map(lambda leaf: leaf[index], now)
            one = lambda k, parts, old: begin(k, jax.tree.unflatten(structure, parts), old)
            return jax.vmap(one, in_axes=(0, axes, 0))(key[index], picked, like)

        restarted = _in_groups(begin_group, done, now, group=-(-size // ratio))
        return restarted, jax.tree.map(lambda _: True, restarted)

    return restart


def checked_ratio(reset_ratio: Any) -> int:
    """Returns the option `reset_ratio` of an environment, or raises a `UsageError` if it is below 1."""
    ratio = coerce("reset_ratio", int, reset_ratio)
    if ratio < 1:
        raise UsageError(
            f"reset_ratio={ratio} must be at least 1. With reset_ratio=1, every step computes a reset of every "
            "environment."
        )
    return ratio


def _in_groups(
    begin_group: Callable[[Int[Array, " G"]], PyTree[Array]],
    done: Bool[Array, " E"],
    now: PyTree[Array],
    *,
    group: int,
) -> PyTree[Array]:
    """Returns the rows of `now`, with finished rows replaced."""
    num_envs, num_groups = done.size, -(-done.size // group)
    rank = jnp.cumsum(done, dtype=jnp.int32) - 1
    count = rank[-1] + 1
    # After the last finished environment, the index is `E`: this row is read from the end, and never written.
    slots = jnp.full(num_groups * group, num_envs, jnp.int32)
    finished = slots.at[jnp.where(done, rank, slots.size)].set(jnp.arange(num_envs), mode="drop")

    def body(carry: _Carry) -> _Carry:
        index = jax.lax.dynamic_slice(finished, (carry.first,), (group,))
        row = rank - carry.first
        is_begun, row = done & (row >= 0) & (row < group), jnp.clip(row, 0, group - 1)

        def write(old: Array, new: Array) -> Array:
            if math.prod(old.shape[1:]) > MAX_SELECTED:
                return old.at[index].set(new, mode="drop")
            return jnp.where(jax.lax.expand_dims(is_begun, range(1, old.ndim)), new[row], old)

        return _Carry(carry.first + group, jax.tree.map(write, carry.now, begin_group(index)))

    return jax.lax.while_loop(lambda carry: carry.first < count, body, _Carry(jnp.int32(0), now)).now


def _broadcast(size: int, batched: PyTree[bool], value: PyTree[Array]) -> PyTree[Array]:
    """Adds a leading axis of environments to a value without one."""
    return jax.tree.map(lambda b, v: v if b else jnp.broadcast_to(v, (size, *jnp.shape(v))), batched, value)


def _without(items: list[Any], position: int) -> list[Any]:
    return [item for number, item in enumerate(items) if number != position]
