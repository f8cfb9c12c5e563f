"""Fused steps of policy and environment, each from where the ordinary ones have come, over whole episodes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from code_runs import evaluate_by_code
from edge_environments import ENVIRONMENTS
from fused_runs import assert_same, by_program

from one_time import first_state
from rollmill.algorithms import mappo, ppo
from rollmill.dataflow import Graph, step_one
from rollmill.envs import auto_reset, make
from rollmill.fusion import evaluate
from rollmill.networks import NetworkConfig

ENVS, STEPS = 4, 200

SMALL = {"hidden_sizes": (16, 16)}
NETWORKS = {
    "separate": NetworkConfig(**SMALL),
    "shared": NetworkConfig(**SMALL, shared_torso=True, activation="relu"),
    "gru": NetworkConfig(**SMALL, torso="gru", recurrent_size=16, shared_torso=True),
    "lstm": NetworkConfig(**SMALL, torso="lstm", recurrent_size=16),
    "normalised": NetworkConfig(**SMALL, layer_norm=True),
    "residual": NetworkConfig(**SMALL, residual=True, shared_torso=True),
}


def assert_steps_as_unfused(
    graph: Graph, steps: int = STEPS, *, compiled: bool = True, evaluate: Callable = evaluate
) -> None:
    state = first_state(graph, jax.random.key(3), jnp.arange(ENVS))
    weights = graph.weights(state.learner)

    def step(collector, key):
        keys = jax.random.split(key, ENVS)
        after, out = jax.vmap(partial(step_one, graph, weights), in_axes=(0, 0, None))(collector, keys, 5)
        return after, (collector, keys, (after, out))

    _, (before, keys, expected) = jax.jit(lambda c, k: jax.lax.scan(step, c, k))(
        state.collector, jax.random.split(jax.random.key(5), steps)
    )
    flat = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
    one = lambda weights, collector, key: step_one(graph, weights, collector, key, 5)
    fused = lambda w, c, k: by_program(one, (c, k), (w,), carried=True, evaluate=evaluate)
    run = jax.jit(fused) if compiled else fused
    assert_same(run(weights, flat(before), flat(keys)), flat(expected))


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("CartPole-v1", "separate"),
        ("MountainCar-v0", "separate"),
        ("MountainCarContinuous-v0", "shared"),
        ("Acrobot-v1", "shared"),
        ("Pendulum-v1", "separate"),
        ("CartPole-v1", "gru"),
        ("Pendulum-v1", "gru"),
        ("CartPole-v1", "lstm"),
        ("CartPole-v1", "normalised"),
        ("Pendulum-v1", "residual"),
    ],
)
@pytest.mark.slow_beyond(1)
def test_classic_environments(name, network):
    assert_steps_as_unfused(ppo(make(name), num_envs=ENVS, num_steps=8, network=NETWORKS[network]))


@pytest.mark.parametrize("name", ["TMaze-v0", "Probe-ActionMask-v0", "Probe-MultiDiscrete-v0"])
@pytest.mark.slow
def test_probes(name):
    graph = ppo(make(name), num_envs=ENVS, num_steps=8, network=NETWORKS["separate"])
    assert_steps_as_unfused(graph, steps=30, compiled=False)


@pytest.mark.parametrize("way", [evaluate, evaluate_by_code])
@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.slow_beyond(1)
def test_environments_on_the_edges_of_their_types(name, way):
    graph = ppo(make(name), num_envs=ENVS, num_steps=8, network=NETWORKS["separate"])
    assert_steps_as_unfused(graph, evaluate=way)


@pytest.mark.slow
def test_a_game_on_a_board():
    """A ball and bricks on 10 x 10 cells, by selects; not compiled, for that would take longer."""
    env = auto_reset(make("gymnax:Breakout-MinAtar"))
    reset, step = partial(env.reset, params=env.params), partial(env.step, params=env.params)
    keys = jax.random.split(jax.random.key(2), (40, ENVS))
    actions = jax.random.randint(jax.random.key(3), (40, ENVS), 0, 3)
    _, state = jax.jit(jax.vmap(reset))(keys[0])

    def advance(state, drawn):
        timestep = jax.vmap(step)(drawn[0], state, drawn[1])
        return timestep.state, (state, timestep)

    _, (before, expected) = jax.jit(lambda *own: jax.lax.scan(advance, *own))(state, (keys, actions))
    flat = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
    assert_same(by_program(step, (flat(keys), flat(before), flat(actions))), flat(expected))


@pytest.mark.slow
def test_several_agents():
    graph = mappo(
        make("TagGridWorld-Small-v0"), num_envs=ENVS, num_steps=8, network=NetworkConfig(hidden_sizes=(16,))
    )
    assert_steps_as_unfused(graph, steps=40, compiled=False)
