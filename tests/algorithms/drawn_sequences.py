"""Sequences from an experience store with what losses distinguish, and trainings in this process."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import rollmill
from one_time import run_once
from rollmill.core.types import FINAL_MASK
from rollmill.dataflow import collect, init_state
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.record.leaves import to_host


def masked():
    """CartPole that forbids to push against the way the cart is going; it falls or is stopped after nine steps."""
    legal = lambda state, params: jnp.stack([state.inner.velocity < 0.1, state.inner.velocity > -0.1])
    cartpole = rollmill.make("CartPole-v1")
    return rollmill.time_limit(cartpole._replace(action_mask=legal), 9)


def louder(tree, seed):
    """Weights far from the start, where policies are nearly uniform."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda leaf: leaf + np.float32(0.3 * draw(size=leaf.shape)), tree)


def drawn(graph, change, *, rollouts=6):
    """The rings after some rollouts, `change` of the learner's fields, and sequences of unequal weights."""
    count = graph.loops.num_envs

    def run(key):
        state = init_state(graph, key, jnp.arange(count, dtype=jnp.int32))
        weights = graph.weights(state.learner)

        def add(carry, n):
            collector, rings = carry
            collector, trajectory = collect(graph, weights, collector, jax.random.fold_in(key, n))
            return (collector, graph.replay.add(graph, rings, trajectory)), ()

        (_, rings), _ = jax.lax.scan(add, (state.collector, state.rings), jnp.arange(rollouts))
        learner = replace(state.learner, **change(state.learner))
        sample = graph.replay.sample(graph, rings, learner, jax.random.fold_in(key, rollouts), jnp.arange(count))
        samples = sample.minibatch.samples
        samples = samples._replace(weight=jnp.linspace(0.5, 2.0, len(samples.weight)))
        return rings, learner, sample._replace(minibatch=sample.minibatch._replace(samples=samples))

    return run_once(run, jax.random.key(3))


def assert_distinguishing(steps, burn_in, *, masks):
    """Asserts that episodes terminate and are truncated within the sequences, during the burn-in and after it."""
    trained = jax.tree.map(lambda leaf: leaf[:, burn_in:], steps)
    assert trained.terminated.any() and (trained.truncated & ~trained.terminated).any()
    assert (steps.terminated | steps.truncated)[:, :burn_in].any()
    if masks:
        assert not steps.action_mask.all() and not steps.info[FINAL_MASK].all()


def trained(graph, *, devices=1):
    """The state after a training in this process, and the metrics of its iterations."""
    program = lower(graph, devices=jax.devices()[:devices])
    state, rows = program.start(), []
    for window in dispatch_ahead(program, state, first=0, until=graph.loops.iterations):
        state = window.after
        rows += window.metrics
    return to_host(state), rows


def assert_two_devices_equal_one(graph, *, learning_iterations):
    """Returns the state after the training on one device."""
    (one, rows_one), (two, rows_two) = (trained(graph, devices=n) for n in (1, 2))
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert sum(row["epochs"] for row in rows_one) == learning_iterations
    for alone, together in zip(rows_one, rows_two, strict=True):
        for name in alone:
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-3, atol=1e-4, err_msg=name)
    return one
