"""A simulator whose complexity is set by three numbers, for JAX, for PyTorch and as a Gymnasium environment.

Damped oscillators of different stiffness that a force drives. The force holds for a step: a push to one side or
the other, the action, and a pull towards where all of them are on average, which is what couples them. A step is
integrated by semi-implicit Euler in several sub-steps. The three numbers are

    oscillators   state: a position and a velocity of each, float32
    substeps      operations: 6 of each oscillator and sub-step
    observed      memory: how many numbers of the state, positions first, are observed

An episode starts with two random amplitudes, one of the positions and one of the velocities; it ends where the
first oscillator leaves its limits, or after 200 steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from jaxtyping import Array, Float, Int

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs import time_limit

MAX_STEPS = 200
PUSH, COUPLING, DAMPING, TIME_STEP = 2.0, 0.5, 0.1, 0.05
LIMIT, RESET_BOUND = 1.0, 0.5


class Complexity(NamedTuple):
    """The work of a step of one environment."""

    oscillators: int = 8
    substeps: int = 4
    observed: int = 8

    @property
    def state_floats(self) -> int:
        return 2 * self.oscillators

    @property
    def stiffness(self) -> np.ndarray:
        """Stiffness of each oscillator; `[oscillators]`."""
        return np.linspace(1.0, 4.0, self.oscillators, dtype=np.float32)

    @property
    def shape_at_start(self) -> np.ndarray:
        """Factors of a random amplitude in each oscillator; `[oscillators]`."""
        return np.linspace(1.0, -1.0, self.oscillators, dtype=np.float32)

    @property
    def name(self) -> str:
        return f"Oscillators-{self.oscillators}-{self.substeps}-{self.observed}"


class OscillatorsState(eqx.Module):
    """Displacements and their rates."""

    position: Float[Array, " n"]
    velocity: Float[Array, " n"]


def oscillators(complexity: Complexity) -> Environment:
    """Returns the simulator as an environment of Rollmill, with 2 actions; the reward is 1 less the first one's
    square.
    """

    def reset(key: Key, params: Any) -> tuple[Float[Array, " m"], OscillatorsState]:
        amplitude = jax.random.uniform(key, (2,), minval=-RESET_BOUND, maxval=RESET_BOUND)
        state = OscillatorsState(*(amplitude[:, None] * complexity.shape_at_start))
        return observe(state), state

    def step(key: Key, state: OscillatorsState, action: Int[Array, ""], params: Any) -> Timestep:
        push = jnp.where(action == 1, PUSH, -PUSH)
        spring, force = complexity.stiffness, force_on(state.position, push, jnp.mean)

        def substep(now: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            return integrated(complexity, *now, force, spring), None

        # XLA gets straight code, as PyTorch does, and a kernel gets a loop
        start, count = (state.position, state.velocity), complexity.substeps
        moved = OscillatorsState(*jax.lax.scan(substep, start, None, length=count, unroll=count)[0])
        first, no = moved.position[0], jnp.zeros((), bool)
        return Timestep(observe(moved), moved, 1.0 - first * first, jnp.abs(first) > LIMIT, no, {})

    def observe(state: OscillatorsState) -> Float[Array, " m"]:
        return jnp.concatenate([state.position, state.velocity])[: complexity.observed]

    space = spaces.Box(-np.inf, np.inf, (complexity.observed,), np.float32)
    return time_limit(Environment(complexity.name, reset, step, space, spaces.Discrete(2)), MAX_STEPS)


def force_on(position: Any, push: Any, mean: Callable[[Any], Any]) -> Any:
    """Returns the force on all oscillators of one environment in a step; `mean` is over its oscillators."""
    return push + COUPLING * mean(position)


def integrated(
    complexity: Complexity, position: Any, velocity: Any, force: Any, stiffness: Any
) -> tuple[Any, Any]:
    """Positions and velocities after ONE sub-step; arrays of JAX or NumPy, or tensors of PyTorch."""
    dt = TIME_STEP / complexity.substeps
    velocity = velocity + dt * (force - stiffness * position - DAMPING * velocity)
    return position + dt * velocity, velocity


class GymnasiumOscillators(gymnasium.Env):
    """The same with NumPy, as a Gymnasium environment."""

    def __init__(self, complexity: Complexity) -> None:
        self.complexity, self.stiffness = complexity, complexity.stiffness
        self.observation_space = spaces.Box(-np.inf, np.inf, (complexity.observed,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.state = np.zeros((2, complexity.oscillators), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self._np_random, _ = gymnasium.utils.seeding.np_random(seed)
        amplitude = self.np_random.uniform(-RESET_BOUND, RESET_BOUND, (2, 1)).astype(np.float32)
        self.state = amplitude * self.complexity.shape_at_start
        return self.observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        push = np.float32(PUSH if action == 1 else -PUSH)
        position, velocity = self.state
        force = force_on(position, push, np.mean)
        for _ in range(self.complexity.substeps):
            position, velocity = integrated(self.complexity, position, velocity, force, self.stiffness)
        self.state = np.stack([position, velocity])
        first = self.state[0, 0]
        return self.observation, float(1.0 - first * first), bool(abs(first) > LIMIT), False, {}

    @property
    def observation(self) -> np.ndarray:
        """Positions first."""
        return self.state.reshape(-1)[: self.complexity.observed].copy()


def gymnasium_oscillators(complexity: Complexity) -> gymnasium.Env:
    """Returns the NumPy simulator with its time limit."""
    return TimeLimit(GymnasiumOscillators(complexity), MAX_STEPS)
