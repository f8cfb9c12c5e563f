"""Chooses how policy and environment become a rollout: a loop that XLA compiles, or one kernel."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from rollmill.core.errors import UsageError
from rollmill.core.types import Key
from rollmill.dataflow import Collector, Graph, Trajectory, Weights, collect, start
from rollmill.fusion import (
    CannotFuse,
    Numerics,
    check_rollout,
    fused_collect,
    run_kernel,
    run_reference,
    tune_rollout,
)

Fusion: TypeAlias = Literal["auto", "off", "rollout"]
"""How deep a training is fused."""

Collect: TypeAlias = Callable[[Graph, Weights, Collector, Key], tuple[Collector, Trajectory]]
"""What `dataflow.collect` is."""


class Rollouts(NamedTuple):
    """How rollouts are computed."""

    collect: Collect
    fused: bool
    note: str | None = None
    """What the user is told."""


def choose_rollouts(
    graph: Graph, *, fusion: Fusion, numerics: Numerics, unroll: int, devices: Sequence[Any], num_seeds: int
) -> Rollouts:
    """The rollouts of a graph on these devices.

    Args:
        graph: what is trained.
        fusion: `off` for the loop; `rollout` for the kernel, or on a CPU for the program that it is made from;
            `auto` for the faster one where there is a choice, by timing.
        numerics: of the kernel's matrix products.
        unroll: steps of the loop that are compiled as one.
        devices: which share the environments.
        num_seeds: trainings side by side.

    Raises:
        UsageError: if `rollout` was asked for and cannot be had.
    """
    plain = Rollouts(partial(collect, unroll=unroll), fused=False)
    on_gpu = devices[0].platform == "gpu"
    if fusion == "off" or (fusion == "auto" and not on_gpu):
        return plain
    try:
        _check(num_seeds, on_gpu=on_gpu)
        check_rollout(graph)
        if not on_gpu:
            return Rollouts(partial(fused_collect, run=run_reference), fused=True)
        return _kernel_or_loop(graph, plain, fusion, numerics, unroll, devices)
    except (CannotFuse, UsageError) as reason:
        if fusion == "rollout":
            raise UsageError(f"fusion=rollout is not possible; auto trains without. {reason}") from reason
        return plain._replace(note=f"rollouts are not fused: {reason}")


def _check(num_seeds: int, *, on_gpu: bool) -> None:
    if num_seeds > 1:
        raise UsageError(f"num_seeds={num_seeds} trains several seeds in one program, and a kernel holds one")
    if on_gpu and importlib.util.find_spec("jax_triton") is None:
        raise UsageError("kernels need packages that are missing: pip install 'rollmill[fusion]'")


def _kernel_or_loop(
    graph: Graph, plain: Rollouts, fusion: Fusion, numerics: Numerics, unroll: int, devices: Sequence[Any]
) -> Rollouts:
    tuned = tune_rollout(graph, *_example(graph, devices), numerics, unroll=unroll)
    gain = tuned.unfused_seconds / tuned.seconds
    if fusion == "auto" and gain < 1:
        return plain._replace(note=f"rollouts are not fused: a kernel would be {1 / gain:.1f} times as slow")
    run = partial(run_kernel, launch=tuned.launch, numerics=numerics)
    where = f"blocks of {tuned.launch.block} environments, {tuned.launch.num_warps} warps each"
    return Rollouts(
        partial(fused_collect, run=run), True, f"rollouts are one kernel ({where}), {gain:.1f} times as fast"
    )


def _example(graph: Graph, devices: Sequence[Any]) -> tuple[Weights, Collector, Key]:
    """Weights, environments and a key as one of the devices has them."""
    share = graph.loops.num_envs // len(devices)

    def begin(index):
        state = start(graph, jax.random.key(0), index)
        return graph.weights(state.learner), state.collector, state.key

    with jax.default_device(devices[0]):
        return jax.jit(begin)(jnp.arange(share, dtype=jnp.int32))
