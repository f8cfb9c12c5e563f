"""The ways to collect that `fusion.py` compares: each makes a trajectory of random actions with one simulator.

All write the observation, the action, the reward and the two flags of every step and environment.
Shape letters: `T` steps, `E` environments.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fusion_simulators import Simulator

import rollmill
from rollmill.core.types import Environment
from rollmill.dataflow import Decision, Graph, Trajectory, collect, start_collector
from rollmill.envs import auto_reset
from rollmill.fusion import Launch, fused_collect, run_kernel


class Absent(Exception):
    """A side that cannot be measured here, and why."""


class Way(NamedTuple):
    """How to collect."""

    side: str
    """One of `SIDES`."""
    fused: int
    """Steps of one call, one CUDA graph, one compiled function or one kernel; of `XLA`, those unrolled."""
    launch: tuple[int, int] | None = None
    """Block and warps of a kernel."""


class Case(NamedTuple):
    """Rollouts that are collected: their simulator and sizes."""

    simulator: Simulator
    num_envs: int
    num_steps: int
    device: str
    """`cuda` or `cpu`."""


class Running(NamedTuple):
    """A way that is ready."""

    rollout: Callable[[], Any]
    """Starts a rollout, which may not have ended yet."""
    wait: Callable[[Any], Any]
    """Waits until a rollout has ended."""
    env_steps: int
    """Environment steps of a rollout, in all environments."""
    ended: Callable[[Any], float]
    """The share of a rollout's steps that ended an episode: alike on all sides, if they do the same."""
    details: dict[str, Any]


GYMNASIUM_STEPS = 16_384
"""Steps in all environments that a Gymnasium rollout is cut to; there is nothing to amortise over more."""


def gymnasium_side(case: Case, way: Way) -> Running:
    """`SyncVectorEnv` on one core of the CPU, with reset in the step that ends an episode."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    steps = max(2, min(case.num_steps, GYMNASIUM_STEPS // case.num_envs))
    how = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
    envs = SyncVectorEnv([case.simulator.to_gymnasium] * case.num_envs, **how)
    random = np.random.default_rng(0)
    held = [envs.reset(seed=0)[0].copy()]
    rows = lambda dtype, *shape: np.zeros((steps, case.num_envs, *shape), dtype)
    observations = rows(np.float32, *held[0].shape[1:])
    actions, rewards, terminated, truncated = rows(np.int32), rows(np.float32), rows(bool), rows(bool)

    def rollout() -> np.ndarray:
        for t in range(steps):
            observations[t], actions[t] = held[0], random.integers(0, 2, case.num_envs)
            held[0], rewards[t], terminated[t], truncated[t], _ = envs.step(actions[t])
        return terminated | truncated

    ended = lambda done: float(done.mean())
    return Running(rollout, lambda _: None, steps * case.num_envs, ended, {"steps": steps})


def torch_side(case: Case, way: Way) -> Running:
    """PyTorch: eager, in CUDA graphs, compiled, or both."""
    try:
        import fusion_torch as collecting
    except ImportError as error:
        raise Absent(f"PyTorch is not installed: {error}") from error
    import torch

    graphs, compiled = "CUDA graph" in way.side, "compile" in way.side
    if graphs and case.device != "cuda":
        raise Absent("CUDA graphs need a GPU")
    if case.device == "cuda" and not torch.cuda.is_available():
        raise Absent("this PyTorch sees no GPU")
    torch.set_grad_enabled(False)
    kernels = collecting.kernels_generated()
    chunk = collecting.chunk_of(case.simulator, case.device, way.fused, compiled=compiled)
    now = collecting.begin(case.simulator.to_torch(case.device), case.num_envs, case.device)
    run = collecting.replayed if graphs else collecting.called
    rollout = run(chunk, now, case.num_steps // way.fused)
    running = Running(rollout, collecting.wait, case.num_envs * case.num_steps, collecting.ended, {})
    if compiled and kernels is not None:
        running.wait(rollout())
        written = (collecting.kernels_generated() or 0) - kernels
        running.details.update({"kernels_generated": written} if written else {})
    return running


def xla_side(case: Case, way: Way) -> Running:
    """`vmap` and `lax.scan` over all steps, one program; `fused` of them unrolled."""
    graph = collecting_graph(case.simulator.environment, case.num_envs, case.num_steps)
    return _jax_running(case, graph, partial(collect, graph, (), unroll=way.fused), calls=1)


def xla_calls_side(case: Case, way: Way) -> Running:
    """Calls a program of `fused` steps again and again from Python."""
    graph = collecting_graph(case.simulator.environment, case.num_envs, way.fused)
    return _jax_running(case, graph, partial(collect, graph, ()), calls=case.num_steps // way.fused)


def kernel_side(case: Case, way: Way) -> Running:
    """Kernels of `fused` steps each, all in one program."""
    if case.device != "cuda":
        raise Absent("kernels need an NVIDIA GPU")
    assert way.launch is not None
    graph = collecting_graph(case.simulator.environment, case.num_envs, way.fused)
    run = partial(run_kernel, launch=Launch(*way.launch), numerics="float32")
    kernel = jax.jit(partial(fused_collect, graph, (), run=run))

    def all_of_them(collector, key):
        trajectory = []
        for n in range(case.num_steps // way.fused):
            collector, steps = kernel(collector, jax.random.fold_in(key, n))
            trajectory.append(steps)
        return collector, trajectory

    program = all_of_them if way.fused < case.num_steps else kernel
    return _jax_running(case, graph, program, calls=1, launch=way.launch)


TORCH_SIDES = ("PyTorch", "PyTorch, CUDA graph", "torch.compile", "torch.compile, CUDA graph")
SIDES: dict[str, Callable[[Case, Way], Running]] = {
    "Gymnasium": gymnasium_side,
    **dict.fromkeys(TORCH_SIDES, torch_side),
    "XLA": xla_side,
    "XLA, calls": xla_calls_side,
    "kernel": kernel_side,
}
ON_JAX = ("XLA", "XLA, calls", "kernel")


def coin(weights: Any, key: Any, memory: Any, observation: Any, action_mask: Any) -> Decision:
    """Draws one of two actions."""
    return Decision((jax.random.bits(key, (), jnp.uint32) % 2).astype(jnp.int32), (), ())


def collecting_graph(env: Environment, num_envs: int, num_steps: int, *, decide: Callable = coin) -> Graph:
    """Returns a graph with random actions, whose trajectory holds the same as that of every side."""
    own = auto_reset(env)
    legal = own.action_mask

    def step(key, state, action):
        return own.step(key, state, action, env.params)._replace(info={"final_observation": ()})

    sizes = {"num_envs": num_envs, "num_steps": num_steps, "total_timesteps": num_envs * num_steps}
    return rollmill.ppo(env, **sizes, num_minibatches=1)._replace(
        environment=step,
        policy=decide,
        start_environment=lambda key, index: own.reset(key, env.params)[::-1],
        start_memory=lambda: (),
        action_mask=lambda state: () if legal is None else legal(state, env.params),
        weights=lambda learner: (),
        compute_values=None,
    )


def _jax_running(case: Case, graph: Graph, program: Callable, *, calls: int, **details: Any) -> Running:
    """Returns rollouts that continue where the last one ended, with eight keys in turn."""
    index = jnp.arange(case.num_envs, dtype=jnp.int32)
    held = [jax.jit(partial(start_collector, graph))(jax.random.key(0), index)]
    keys = itertools.cycle(list(jax.random.split(jax.random.key(1), 8)))
    jitted = jax.jit(program)

    def rollout() -> list:
        trajectory = []
        for _ in range(calls):
            held[0], steps = jitted(held[0], next(keys))
            trajectory.append(steps)
        return trajectory

    return Running(rollout, jax.block_until_ready, case.num_envs * case.num_steps, _ended, details)


def _ended(trajectory: Any) -> float:
    parts = jax.tree.leaves(trajectory, is_leaf=lambda part: isinstance(part, Trajectory))
    return float(np.mean([np.mean(part.steps.terminated | part.steps.truncated) for part in parts]))


def made_ready(case: Case, way: Way) -> Running:
    """Returns a side that has run once, with the seconds until then."""
    began = time.perf_counter()
    running = SIDES[way.side](case, way)
    running.wait(running.rollout())
    return running._replace(details=running.details | {"seconds_to_start": round(time.perf_counter() - began, 2)})
