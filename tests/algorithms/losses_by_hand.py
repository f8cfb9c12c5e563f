"""The computations of fragments in straightforward code, with weights and comparisons to try them.

Shape letters: `T` steps, `E` environments.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from one_time import run_once
from rollmill.dataflow import collect, identity, init_state, minibatch_gather
from rollmill.lowerings.threefry import small_programs

LOOSE = {"rtol": 2e-4, "atol": 1e-5}


class NetworkOutputs(NamedTuple):
    """The outputs of a network for each step `[T, E]`."""

    log_prob: jax.Array
    entropy: jax.Array
    value: jax.Array
    final_value: jax.Array


def unroll_by_hand(policy, weights, observation, action, final_observation, done, memory):
    """Step by step in Python, the memory set back after each end of an episode; ONE environment."""
    outputs = []
    for t in range(len(done)):
        output = policy.forward(weights, memory, observation[t], ())
        distribution, memory = output.distribution, output.memory
        final_value = policy.forward(weights, memory, final_observation[t], ()).value
        outputs.append(
            NetworkOutputs(distribution.log_prob(action[t]), distribution.entropy(), output.value, final_value)
        )
        memory = jax.tree.map(lambda m, d=done[t]: jnp.where(d, jnp.zeros_like(m), m), memory)
    last_memory = memory
    return jax.tree.map(lambda *x: jnp.stack(x), *outputs), last_memory


def normalise_by_hand(statistics, x):
    x = np.asarray(x, np.float64)
    return np.clip((x - np.asarray(statistics.mean)) / np.sqrt(np.asarray(statistics.variance) + 1e-8), -10, 10)


def said_of(rollout, weights):
    """The outputs of the policy that learns, with the memory that the other left it at the start."""
    steps = rollout.trajectory.steps
    statistics = rollout.learner.weights.observations
    seen, final = (
        jnp.asarray(normalise_by_hand(statistics, x), jnp.float32)
        for x in (steps.observation, steps.final_observation)
    )
    lifted = jax.vmap(partial(unroll_by_hand, rollout.policy, weights), in_axes=(1, 1, 1, 1, 0), out_axes=(1, 0))
    done = steps.terminated | steps.truncated
    return lifted(seen, steps.action, final, done, rollout.trajectory.start_memory)


def two_rollouts(graph, key, *, learns=lambda learner: learner, acts=lambda learner: learner):
    """The state before a second rollout, the rollout, and the learner and the batch that are prepared from it.

    `learns` changes the learner after the first rollout, and `acts` gives the learner that the second one is
    collected by. Nothing is learned, which would take long to compile. Both rollouts are made by one program.
    """

    @eqx.filter_jit
    def roll(acting, learner, collector, key):
        collector, trajectory = collect(graph, graph.weights(acting), collector, key)
        return collector, trajectory, *graph.prepare(learner, trajectory, reduce=identity, replicas=1)

    begin = partial(init_state, graph, index=jnp.arange(graph.loops.num_envs, dtype=jnp.int32))
    state = run_once(begin, key)
    with small_programs():
        collector, _, learner, _ = roll(state.learner, state.learner, state.collector, jax.random.fold_in(key, 1))
    before = replace(state, learner=learns(learner), collector=collector)
    return before, *roll(acts(learner), before.learner, collector, jax.random.key(7))[1:]


def first_rows(rollout, count):
    """The minibatch of the first rows of a rollout's batch, gathered by one program."""
    gather = lambda batch, rows: minibatch_gather(batch, rollout.graph.loops)(rows)
    return eqx.filter_jit(gather)(rollout.batch, np.arange(count, dtype=np.uint32))


def disturbed_network(network, seed=1):
    """Weights far from the start, where the policy would be nearly uniform."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda leaf: leaf + np.float32(0.5 * draw(size=leaf.shape)), network)


def assert_close(ours, theirs, **tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or LOOSE))
