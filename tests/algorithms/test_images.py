"""Large observations: a trajectory holds each of them once, and in the type that the environment gave it."""

import re
from functools import partial

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int

import rollmill
from agents_envs import of_kinds
from one_time import run_once
from rollmill.core.types import AgentKind, Environment, Timestep
from rollmill.dataflow import collect, empty_experience, init_state, minibatch_gather, plain_minibatch_loop
from rollmill.networks import NetworkConfig
from rollmill.programs.compiled import lower
from rollmill.workers.replica.learner import CompiledLearner

SIDE = 40
IMAGE_BYTES = SIDE * SIDE * 4
"""6,400, more than `LARGE_BYTES`."""

NETWORK = NetworkConfig(convolutions=((2, 8, 8),), hidden_sizes=(4,))
ROWS = 8
"""Samples of a minibatch, whatever the number of steps."""


class Counter(eqx.Module):
    """The state: steps of the episode."""

    t: Int[Array, ""]


def image(state):
    """A picture whose every pixel is the number of the step, in tens."""
    return jnp.full((SIDE, SIDE, 4), 10 * state.t, jnp.uint8)


def short_episodes():
    """Episodes of 5 steps that are truncated; the reward is 1."""

    def reset(key, params):
        state = Counter(jnp.int32(0))
        return image(state), state

    def step(key, state, action, params):
        state = Counter(state.t + 1)
        return Timestep(image(state), state, jnp.float32(1), jnp.asarray(False), state.t >= 5, {})

    space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 4), np.uint8)
    return Environment("Counter", reset, step, space, gymnasium.spaces.Discrete(2), ())


def graph_of(*, shared, num_steps=16, **changes):
    network = NETWORK if not shared else NetworkConfig(**{**vars(NETWORK), "shared_torso": True})
    return rollmill.ppo(
        short_episodes(),
        total_timesteps=4 * num_steps,
        num_envs=4,
        num_steps=num_steps,
        num_minibatches=4 * num_steps // ROWS,
        update_epochs=1,
        network=network,
        normalize_values=True,
        **changes,
    )


def watchers():
    """Two agents with an image each, of which the second is inactive in the last step of an episode."""
    env = short_episodes()
    wrap = lambda leaf: {"watcher": jnp.stack([leaf, leaf])}

    def reset(key, params):
        observation, state = env.reset(key, params)
        return wrap(observation), state

    def step(key, state, action, params):
        timestep = env.step(key, state, action, params)
        return timestep._replace(observation=wrap(timestep.observation), reward=wrap(timestep.reward))

    kind = AgentKind("watcher", 2, env.observation_space, env.action_space)
    active = lambda state, params: {"watcher": jnp.stack([jnp.asarray(True), state.t < 4])}
    return of_kinds("Watchers", reset, step, kind, active=active)


def agents_graph(algorithm, num_steps=16):
    return algorithm(
        watchers(),
        total_timesteps=4 * num_steps,
        num_envs=4,
        num_steps=num_steps,
        num_minibatches=4 * num_steps // ROWS,
        update_epochs=1,
        network=NETWORK,
    )


def sequences_graph(num_envs=4, num_steps=16, **changes):
    return rollmill.impala(
        short_episodes(),
        total_timesteps=num_envs * num_steps,
        num_envs=num_envs,
        num_steps=num_steps,
        num_minibatches=num_envs // 2,
        network=NETWORK,
        num_shards=1,
        normalize_values=True,
        **changes,
    )


def rollout(graph):
    state = init_state(graph, jax.random.key(0), jnp.arange(4))
    weights = graph.weights(state.learner)
    return state.learner, jax.jit(partial(collect, graph))(weights, state.collector, jax.random.key(1))[1]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compacted_steps_lead_to_the_same_batch(shared):
    graph = graph_of(shared=shared)
    learner, compacted = rollout(graph)
    _, whole = rollout(graph._replace(compact_step=None))
    assert compacted.steps.final_observation == ()
    assert compacted.steps.observation.dtype == np.uint8
    np.testing.assert_array_equal(compacted.steps.observation, whole.steps.observation)
    assert np.asarray(whole.steps.truncated).sum() == 4 * 3  # 16 steps of 4 environments, one truncation in each 5
    prepare = jax.jit(partial(graph.prepare, reduce=lambda tree: tree, replicas=1))
    batches = [prepare(learner, trajectory)[1].samples for trajectory in (compacted, whole)]
    for name in ("observation", "value", "advantage", "target"):
        found, expected = (np.asarray(getattr(batch, name)) for batch in batches)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", [rollmill.mappo, pytest.param(rollmill.ippo, marks=pytest.mark.slow)])
def test_compacted_steps_of_several_agents_lead_to_the_same_batch(algorithm):
    graph = agents_graph(algorithm)
    learner, compacted = rollout(graph)
    _, whole = rollout(graph._replace(compact_step=None))
    assert jax.tree.leaves(compacted.steps.final_observation.agents) == []
    np.testing.assert_array_equal(compacted.steps.truncated, whole.steps.truncated)
    assert np.asarray(whole.steps.truncated).sum() == 4 * 3
    prepare = jax.jit(partial(graph.prepare, reduce=lambda tree: tree, replicas=1))
    batches = [prepare(learner, trajectory)[1].samples for trajectory in (compacted, whole)]
    for name in ("value", "advantage", "target", "log_prob"):
        found, expected = (np.asarray(getattr(batch.agents["watcher"], name)) for batch in batches)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(*(np.asarray(batch.weight["watcher"]) for batch in batches))


def sequence_gradients(graph, learner, trajectory):
    def run(learner, trajectory):
        _, batch = graph.prepare(learner, trajectory, reduce=lambda tree: tree, replicas=1)
        return graph.gradients(learner, minibatch_gather(batch, graph.loops)(jnp.arange(4, dtype=jnp.uint32)))

    return run_once(run, learner, trajectory)


def test_compacted_steps_lead_to_the_same_gradients_of_sequences():
    """By the weights that have collected them, which an iteration of one minibatch learns with."""
    graph = sequences_graph(gamma=0.9)
    learner, compacted = rollout(graph)
    _, whole = rollout(graph._replace(compact_step=None))
    assert compacted.steps.final_observation == () and np.asarray(whole.steps.truncated).any()
    found, expected = (sequence_gradients(graph, learner, trajectory) for trajectory in (compacted, whole))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


def test_only_the_value_of_a_truncation_is_by_the_weights_that_collected():
    """With the learner's value in its place, gradients by other weights are those of whole steps."""
    graph = sequences_graph()
    learner, compacted = rollout(graph)
    _, whole = rollout(graph._replace(compact_step=None))
    other = init_state(graph, jax.random.key(7), jnp.arange(4)).learner

    def final_values(learner):
        value = jax.vmap(jax.vmap(partial(graph.outputs.value, graph.weights(learner))))
        return jnp.where(whole.steps.truncated, value((), whole.steps.final_observation), 0.0)

    extras = compacted.steps.extras
    np.testing.assert_allclose(extras.final_value, final_values(learner), rtol=1e-4, atol=1e-6)
    steps = compacted.steps._replace(extras=extras._replace(final_value=final_values(other)))
    found = sequence_gradients(graph, other, compacted._replace(steps=steps))
    expected = sequence_gradients(graph, other, whole)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


def program_bytes(graph):
    memory = lower(graph).step.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_stored_step_takes_little_more_than_its_image(shared):
    """As floats it would take four times as much, with its final observation twice."""
    few, many = (program_bytes(graph_of(shared=shared, num_steps=num_steps)) for num_steps in (256, 512))
    each = (many - few) / (256 * 4)
    assert IMAGE_BYTES <= each <= 1.3 * IMAGE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [rollmill.ippo, rollmill.mappo])
def test_a_stored_step_of_two_agents_takes_little_more_than_their_images(algorithm):
    few, many = (program_bytes(agents_graph(algorithm, num_steps)) for num_steps in (64, 128))
    each = (many - few) / (64 * 4)
    assert 2 * IMAGE_BYTES <= each <= 1.3 * 2 * IMAGE_BYTES


@pytest.mark.slow
def test_a_stored_step_of_a_sequence_takes_little_more_than_its_image():
    """Minibatches are of two sequences, however many environments there are."""
    few, many = (program_bytes(sequences_graph(num_envs, num_steps=64)) for num_envs in (8, 16))
    each = (many - few) / (8 * 64)
    assert IMAGE_BYTES <= each <= 1.3 * IMAGE_BYTES


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an option of CPUs")
def test_a_learner_beside_environments_on_the_host_leaves_no_convolution_to_a_library():
    network = NetworkConfig(shared_torso=True, hidden_sizes=(4,))
    graph = rollmill.ppo(short_episodes(), total_timesteps=64, num_envs=4, num_steps=16, network=network)
    key, index = jax.random.key(0), np.arange(4)
    state = jax.eval_shape(lambda: init_state(graph, key, jnp.arange(4)))
    weights = graph.weights(state.learner)
    trajectory = jax.eval_shape(partial(collect, graph), weights, state.collector, key)[1]
    program = CompiledLearner(graph, key, index, plain_minibatch_loop)._compile(
        (), state.learner, trajectory, np.int32(0)
    )
    called = set(re.findall(r"kind=kCustom, calls=(%[\w.]+)", program.as_text()))
    of_libraries = (part for part in re.split(r"\n(?=%|ENTRY)", program.as_text()) if part.split(" ")[0] in called)
    assert " convolution(" in program.as_text() or "rollmill_" in program.as_text()
    assert [part for part in of_libraries if " convolution(" in part] == []


def test_a_step_in_a_replay_memory_takes_one_image():
    """A ring holds each observation once, as the environment gave it; the next one is that of the next slot."""
    graph = rollmill.dqn(
        short_episodes(),
        total_timesteps=1024,
        num_envs=4,
        buffer_size=1024,
        learning_starts=128,
        network=NETWORK,
    )
    assert graph.replay is not None
    rings = jax.eval_shape(partial(empty_experience, graph), jnp.arange(4))
    kept = 4 * graph.replay.capacity
    leaves = jax.tree.leaves(rings)
    images = [leaf for leaf in leaves if leaf.size * leaf.dtype.itemsize >= kept * IMAGE_BYTES]
    assert [leaf.dtype for leaf in images] == [np.uint8]
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / kept
    assert IMAGE_BYTES <= each <= 1.02 * IMAGE_BYTES  # beside it a few numbers, and the ring's own counts


def test_a_trajectory_with_a_number_that_is_not_finite_says_so():
    """Of a large final observation of floats only that is kept."""
    env = short_episodes()

    def step(key, state, action, params):
        timestep = env.step(key, state, action, params)
        broken = jnp.where(timestep.truncated, jnp.nan, 0.5)
        return timestep._replace(observation=jnp.full((SIDE, SIDE, 4), broken, jnp.float32))

    def reset(key, params):
        return jnp.full((SIDE, SIDE, 4), 0.5, jnp.float32), Counter(jnp.int32(0))

    space = gymnasium.spaces.Box(-np.inf, np.inf, (SIDE, SIDE, 4), np.float32)
    broken = env._replace(reset=reset, step=step, observation_space=space)
    graph = rollmill.ppo(broken, total_timesteps=64, num_envs=4, num_steps=16, network=NETWORK)
    _, trajectory = rollout(graph)
    final = np.asarray(trajectory.steps.final_observation)
    np.testing.assert_array_equal(np.isnan(final), np.asarray(trajectory.steps.truncated))
