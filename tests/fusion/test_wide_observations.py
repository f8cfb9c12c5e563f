"""Observations of 65 to 512 numbers are fused, or refused with the shape of what cannot be split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_runs import assert_same, by_program, by_vmap
from gymnasium import spaces

import rollmill
from rollmill.fusion import CHIPS, CannotFuse, Launch, explain, largest_tiled_size, lower_function, lower_rollout
from rollmill.fusion.backends.triton.compile import compile_for
from rollmill.fusion.backends.triton.launches import triton_backend
from rollmill.fusion.lower.values import MAX_COLUMNS
from wordings import raises

WIDTHS = (65, 108, 128, 200, 512)
ENDS = [WIDTHS[0], WIDTHS[-1]]
ACTIONS = 12
"""Enough for the actions to be a row, rather than single numbers."""


def numbers_and_action(state, action):
    """As of a robot: numbers that the physics compute, and the last action."""
    return jnp.concatenate([jnp.sin(state[:-ACTIONS] * 2.0), action])


def state_and_action(state, action):
    return jnp.concatenate([state[:-ACTIONS], action])


def state_alone(state, action):
    return state * 0.5 + action[0]


def state_in_turned_order(state, action):
    return state[::-1] + action[0]


def both_halves_exchanged(state, action):
    half = state.shape[0] // 2
    return jnp.concatenate([state[half:], state[:half]]) * action[1]


OBSERVED = (numbers_and_action, state_and_action, state_alone, state_in_turned_order, both_halves_exchanged)


def step_with(observe):
    """A step of policy and environment, whose observation the next step reads."""

    def step(matrix, carried):
        observation, state = carried
        action = jnp.tanh(observation @ matrix)
        state = state * 0.9 + 0.1 * action[0]
        return (observe(state, action), state), jnp.sum(action * action)

    return step


@pytest.mark.parametrize("width", ENDS + [pytest.param(width, marks=pytest.mark.slow) for width in WIDTHS[1:-1]])
@pytest.mark.parametrize("observe", OBSERVED)
def test_wide_observations_are_those_of_xla(observe, width):
    one, other, third = jax.random.split(jax.random.key(width), 3)
    carried = jax.random.normal(one, (4, width)), jax.random.normal(other, (4, width))
    matrix = jax.random.normal(third, (width, ACTIONS)) / np.sqrt(width)
    step, each = step_with(observe), (carried,)
    assert_same(by_program(step, each, (matrix,), carried=True), by_vmap(step, each, (matrix,)), atol=1e-5)


@pytest.mark.parametrize("width", [width for width in WIDTHS if width - 8 > MAX_COLUMNS])
def test_actions_that_cannot_be_split_are_named_by_their_own_shape(width):
    """The observation has more numbers, but the others need not be split."""
    matrix, shape = (
        jax.ShapeDtypeStruct((width, width - 8), jnp.float32),
        jax.ShapeDtypeStruct((width,), jnp.float32),
    )
    step = step_with(lambda state, action: jnp.concatenate([jnp.sin(state[:8]), action]))
    with raises("array-shape-is-taken-apart", f"({width - 8},)", str(MAX_COLUMNS), kind=CannotFuse):
        lower_function(step, ((shape, shape),), (matrix,), carried=True)


def walker(width):
    """An environment whose observation is `width` numbers, the last of them the action."""
    scales = np.linspace(0.5, 1.5, width).astype(np.float32)

    def reset(key, params):
        pose = jax.random.normal(key)
        return numbers_and_action(pose * scales, jnp.zeros(ACTIONS)), pose

    def step(key, pose, action, params):
        pose = pose * 0.9 + 0.1 * jnp.tanh(action[0])
        observation = numbers_and_action(pose * scales, action)
        return rollmill.Timestep(observation, pose, -(pose**2), jnp.abs(pose) > 2.0, jnp.asarray(False), {})

    box = spaces.Box(-np.inf, np.inf, (width,), np.float32)
    actions = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
    return rollmill.time_limit(rollmill.Environment("Walker", reset, step, box, actions), 25)


def graph_on_walker(*hidden_sizes):
    sizes = {"num_envs": 32, "num_steps": 4, "total_timesteps": 128, "num_minibatches": 1}
    network = rollmill.NetworkConfig(hidden_sizes=hidden_sizes, shared_torso=True)
    return rollmill.ppo(walker(108), **sizes, network=network)


def test_large_networks_read_wide_observations_in_tiles():
    """With the layers of the humanoid's recipe."""
    step = lower_rollout(graph_on_walker(400, 200, 100))
    assert largest_tiled_size(step.program) == 400 * 200
    (launch,) = triton_backend("tf32").rollouts.launches(4_096, 38_000, largest_matrix=400 * 200)
    assert launch.tile == 64 and launch.kept_kilobytes == 0


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize(
    ("hidden_sizes", "launch"),
    [((16,), Launch(32, 1)), ((400, 200, 100), Launch(32, 4, tile=64))],
)
def test_a_kernel_with_the_observation_of_a_humanoid_compiles(hidden_sizes, launch, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    found = explain(graph_on_walker(*hidden_sizes), CHIPS["H200"], "tf32", launch)
    assert ".target sm_90" in compile_for(found.kernel, found.arrays, 90).asm["ptx"]
