"""The simulators of `fusion.py`, each three times: for JAX, for PyTorch, for Gymnasium; and a check of their
equality.

Shape letter: `E` environments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from oscillators import (
    LIMIT,
    MAX_STEPS,
    PUSH,
    RESET_BOUND,
    Complexity,
    OscillatorsState,
    force_on,
    gymnasium_oscillators,
    integrated,
    oscillators,
)

import rollmill
from rollmill.core.types import Environment
from rollmill.envs.cartpole import CartPoleParams, CartPoleState


class TorchSimulator(NamedTuple):
    """Functions of tensors that hold all environments; a state is a tuple of tensors, `[E]` or `[E, n]`."""

    start: Callable[[int], tuple]
    """Returns random states of a number of environments at the start of an episode."""
    advance: Callable[[tuple, Any], tuple]
    """`(state, action [E]) -> (state, reward [E], terminated [E])`, without reset."""
    observe: Callable[[tuple], tuple]
    """Returns the parts of a state that are stored: tensors `[E]` or `[E, m]`."""
    max_steps: int


class Simulator(NamedTuple):
    """One simulator for all sides."""

    name: str
    environment: Environment
    to_torch: Callable[[str], TorchSimulator]
    """By device."""
    to_gymnasium: Callable[[], gymnasium.Env]
    to_jax_state: Callable[[Any], Any]
    """From numbers `[state]` to the physical state of ONE environment."""
    to_torch_state: Callable[[Any], tuple]
    """From a tensor `[E, state]`."""
    set_gymnasium_state: Callable[[gymnasium.Env, np.ndarray], None]
    scale: np.ndarray
    """Magnitude of each number of a state; `[state]`."""
    complexity: Complexity | None


def cartpole_simulator() -> Simulator:
    limits = CartPoleParams()
    return Simulator(
        "CartPole-v1",
        rollmill.make("CartPole-v1"),
        _cartpole_torch,
        lambda: TimeLimit(CartPoleEnv(), 500),
        lambda numbers: CartPoleState(*numbers),
        lambda numbers: numbers.unbind(1),
        lambda env, numbers: setattr(env.unwrapped, "state", numbers.astype(np.float64)),
        np.array([limits.position_limit, 1.0, limits.angle_limit, 1.0], np.float32),
        None,
    )


def oscillators_simulator(complexity: Complexity) -> Simulator:
    count = complexity.oscillators
    return Simulator(
        complexity.name,
        oscillators(complexity),
        partial(_oscillators_torch, complexity),
        lambda: gymnasium_oscillators(complexity),
        lambda numbers: OscillatorsState(numbers[:count], numbers[count:]),
        lambda numbers: (numbers[:, :count], numbers[:, count:]),
        lambda env, numbers: setattr(env.unwrapped, "state", numbers.reshape(2, count)),
        np.full(complexity.state_floats, LIMIT, np.float32),
        complexity,
    )


def _cartpole_torch(device: str) -> TorchSimulator:
    import torch

    p = CartPoleParams()
    total_mass, pole_moment = p.cart_mass + p.pole_mass, p.pole_mass * p.pole_half_length

    def start(num_envs: int) -> tuple:
        return torch.empty(4, num_envs, device=device).uniform_(-p.reset_bound, p.reset_bound).unbind(0)

    def advance(state: tuple, action: Any) -> tuple:
        position, velocity, angle, rate = state
        force = torch.where(action == 1, p.force, -p.force)
        cos, sin = torch.cos(angle), torch.sin(angle)
        push = (force + pole_moment * rate * rate * sin) / total_mass
        inertia = p.pole_half_length * (4.0 / 3.0 - p.pole_mass * cos * cos / total_mass)
        angular_acceleration = (p.gravity * sin - cos * push) / inertia
        acceleration = push - pole_moment * angular_acceleration * cos / total_mass
        position, velocity = position + p.time_step * velocity, velocity + p.time_step * acceleration
        angle, rate = angle + p.time_step * rate, rate + p.time_step * angular_acceleration
        terminated = (position.abs() > p.position_limit) | (angle.abs() > p.angle_limit)
        return (position, velocity, angle, rate), torch.ones_like(position), terminated

    return TorchSimulator(start, advance, lambda state: state, 500)


def _oscillators_torch(complexity: Complexity, device: str) -> TorchSimulator:
    import torch

    stiffness = torch.from_numpy(complexity.stiffness).to(device)
    shape_at_start = torch.from_numpy(complexity.shape_at_start).to(device)
    positions = min(complexity.observed, complexity.oscillators)
    velocities = complexity.observed - positions

    def start(num_envs: int) -> tuple:
        amplitude = torch.empty(2, num_envs, 1, device=device).uniform_(-RESET_BOUND, RESET_BOUND)
        return (amplitude * shape_at_start).unbind(0)

    def advance(state: tuple, action: Any) -> tuple:
        position, velocity = state
        push = torch.where(action == 1, PUSH, -PUSH)[:, None]
        force = force_on(position, push, lambda x: x.mean(1, keepdim=True))
        for _ in range(complexity.substeps):
            position, velocity = integrated(complexity, position, velocity, force, stiffness)
        first = position[:, 0]
        return (position, velocity), 1.0 - first * first, first.abs() > LIMIT

    def observe(state: tuple) -> tuple:
        position, velocity = state
        if velocities == 0:
            return (position if positions == complexity.oscillators else position[:, :positions].contiguous(),)
        return position, velocity[:, :velocities].contiguous()

    return TorchSimulator(start, advance, observe, MAX_STEPS)


def differences(simulator: Simulator, *, num_envs: int = 64, torch_too: bool = True) -> dict[str, float]:
    """Returns the greatest difference of observations and rewards from JAX after one step from the same states.

    States are random within limits, actions too; flags that differ count as 1.
    """
    random = np.random.default_rng(0)
    states = (random.uniform(-1.0, 1.0, (num_envs, simulator.scale.size)) * simulator.scale).astype(np.float32)
    actions = random.integers(0, 2, num_envs)
    sides = {"gymnasium": _stepped_by_gymnasium} | ({"torch": _stepped_by_torch} if torch_too else {})
    right = _stepped_by_jax(simulator, states, actions)
    double = lambda each: np.asarray(each, np.float64)
    return {
        name: max(
            float(np.abs(double(x) - double(y)).max())
            for x, y in zip(step(simulator, states, actions), right, strict=True)
        )
        for name, step in sides.items()
    }


def _stepped_by_jax(simulator: Simulator, states: np.ndarray, actions: np.ndarray) -> tuple:
    env = simulator.environment

    def one(numbers, action):
        _, timed = env.reset(jax.random.key(0), env.params)
        timed = type(timed)(inner=simulator.to_jax_state(numbers), elapsed=timed.elapsed)
        timestep = env.step(jax.random.key(0), timed, action, env.params)
        return timestep.observation, timestep.reward, timestep.terminated

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(states, jnp.asarray(actions, jnp.int32)))


def _stepped_by_torch(simulator: Simulator, states: np.ndarray, actions: np.ndarray) -> tuple:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sides = simulator.to_torch(device)
    state = simulator.to_torch_state(torch.from_numpy(states).to(device))
    moved, reward, terminated = sides.advance(state, torch.from_numpy(actions).to(device))
    seen = [x.reshape(len(states), -1) for x in sides.observe(moved)]
    return torch.cat(seen, 1).cpu().numpy(), reward.cpu().numpy(), terminated.cpu().numpy()


def _stepped_by_gymnasium(simulator: Simulator, states: np.ndarray, actions: np.ndarray) -> tuple:
    env, found = simulator.to_gymnasium(), []
    for numbers, action in zip(states, actions, strict=True):
        env.reset(seed=0)
        simulator.set_gymnasium_state(env, numbers)
        found.append(env.step(int(action))[:3])
    return tuple(map(np.array, zip(*found, strict=True)))
