"""Describes, allocates and fills the arrays that hold one step of several host environments."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.spaces import struct
from rollmill.core.types import FINAL_MASK, UNSTABLE, HostEnvironment, HostStep
from rollmill.envs.agents import possible_masks, reward_struct
from rollmill.envs.host.numbers import cast_exactly

COUNTS = {"episode_return", "episode_length", "discounted_return", "agent_returns", UNSTABLE}


def step_struct(env: HostEnvironment, num_envs: int, *, discounted: bool = False) -> HostStep:
    """Returns the shapes and dtypes of one step of `num_envs` host environments.

    Args:
        env: the environment. Dtypes follow `core.spaces.struct`.
        num_envs: number of environments, the size of axis 0.
        discounted: whether the environments are started with a `gamma`.
    """
    vector: Any = lambda dtype: jax.ShapeDtypeStruct((num_envs,), dtype)
    batch = lambda leaf: jax.ShapeDtypeStruct((num_envs, *leaf.shape), leaf.dtype)
    observation = jax.tree.map(batch, struct(env.observation_space))
    info: dict[str, Any] = {
        "final_observation": observation,
        "episode_return": vector(np.float32),
        "episode_length": vector(np.int32),
    }
    if discounted:
        info["discounted_return"] = vector(np.float32)
    if env.has_action_mask:
        info["action_mask"] = jax.tree.map(batch, possible_masks(env))
        if not env.agents:
            info[FINAL_MASK] = info["action_mask"]
    flag = vector(np.bool_)
    if env.reports_unstable:
        info[UNSTABLE] = flag
    if env.agents:
        info |= {"agent_returns": {kind.name: vector(np.float32) for kind in env.agents}}
        active = {kind.name: jax.ShapeDtypeStruct((num_envs, kind.count), np.bool_) for kind in env.agents}
        info |= {"active": active, "final_active": active}
    return HostStep(observation, jax.tree.map(batch, reward_struct(env)), flag, flag, info)


def allocate(like: PyTree[jax.ShapeDtypeStruct]) -> PyTree[np.ndarray]:
    """Allocates uninitialised arrays with the given shapes and dtypes."""
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)


def write_reset(space: spaces.Space, first: PyTree[np.ndarray], out: HostStep) -> None:
    """Writes the result of a reset to `out`, except for masks and active agents, which the caller writes."""
    counts = [out.info[name] for name in COUNTS & set(out.info)]
    for field in jax.tree.leaves([out.reward, out.terminated, out.truncated, counts]):
        field[:] = 0
    copy_batch(space, first, out.observation)
    copy_batch(space, first, out.info["final_observation"])


def copy_batch(
    space: spaces.Space, source: PyTree[np.ndarray], target: PyTree[np.ndarray], *, rows: Any = ...
) -> None:
    """Copies a batch of observations to `target`, or only to its `rows`, and casts them to its dtypes.

    Raises:
        CastError: an integer does not fit into the dtype of `target`.
    """
    if isinstance(source, np.ndarray):
        target[rows] = cast_exactly(source, target.dtype)
        return
    for target_leaf, source_leaf in zip(leaves(space, target), leaves(space, source), strict=True):
        target_leaf[rows] = cast_exactly(source_leaf, target_leaf.dtype)


def leaves(space: spaces.Space, value: Any) -> Iterator[Any]:
    """Yields the leaves of an element of a space, or of a batch of elements, in the order of the space."""
    match space:
        case spaces.Dict():
            for name, part in space.spaces.items():
                yield from leaves(part, value[name])
        case spaces.Tuple():
            for part, v in zip(space.spaces, value, strict=True):
                yield from leaves(part, v)
        case _:
            yield value
