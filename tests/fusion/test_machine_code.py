"""Machine code for CPUs: its functions beside double precision, and whole rollouts beside JAX's own functions."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from one_time import first_state
from rollmill import NetworkConfig, make, ppo
from rollmill.core.machine import describe_processor
from rollmill.dataflow import identity, init_state
from rollmill.fusion import first_batch, fused_collect, run_reference
from rollmill.fusion.backends.cpu import ffi, functions
from rollmill.fusion.backends.cpu.builder import FLOAT32, number_type
from rollmill.fusion.backends.cpu.ffi import NativeKernel, call, new_program
from rollmill.fusion.backends.cpu.launches import cpu_backend
from rollmill.fusion.backends.cpu.target import processor
from rollmill.fusion.kernels.gradients import fused_gradients
from rollmill.programs.compiled import lower
from rollmill.record.leaves import to_host
from wordings import raises

COUNT = 1 << 14
BY_C = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 3e38, 88.8, -88.0, 1.0, -1.0, 0.5, 2.0, -20.0, 1e4]


def arguments(least=-np.inf, most=np.inf):
    """Numbers of all sizes and signs, and special ones, within bounds."""
    random = np.random.default_rng(0)
    wide = random.standard_normal(COUNT) * np.exp(random.uniform(-20, 6, COUNT))
    wide[: len(BY_C)] = BY_C
    return np.clip(wide, least, most).astype(np.float32)


def computed(function, x):
    """A function of vectors, for all numbers."""
    lanes = processor().lanes
    emit, (source, target), _, _ = new_program(lanes, 2)
    with emit.loop(x.size, step=lanes) as first:
        place = lambda pointer: emit.at(pointer, first, number_type(FLOAT32))
        emit.store(function(emit, emit.load(place(source), FLOAT32)), place(target), FLOAT32)
    emit.builder.ret_void()
    kernel = NativeKernel(emit.module, 1, 64, (jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32)),))
    return np.asarray(jax.jit(lambda x: call(kernel, [x])[0])(x), np.float64)


@pytest.mark.parametrize(
    ("function", "exact", "bounds"),
    [
        (functions.exp, np.exp, (-80, np.inf)),
        (functions.exp2, np.exp2, (-120, np.inf)),
        (functions.expm1, np.expm1, ()),
        (functions.tanh, np.tanh, ()),
        (functions.logistic, special.expit, (-80, np.inf)),
        (functions.log, np.log, (0, np.inf)),
        (functions.log1p, np.log1p, (-0.9999, np.inf)),
        (functions.sin, np.sin, (-1e5, 1e5)),
        (functions.cos, np.cos, (-1e5, 1e5)),
        (functions.tan, np.tan, (-1e5, 1e5)),
        (functions.erf_inv, special.erfinv, (-1, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_functions_are_right_to_the_last_places(function, exact, bounds):
    x = arguments(*bounds)
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64)).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(computed(function, x), expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "num_envs", "network"),
    [
        ("CartPole-v1", 37, NetworkConfig(hidden_sizes=(40, 24))),
        ("Pendulum-v1", 5, NetworkConfig(hidden_sizes=(16,), shared_torso=True)),
        ("CartPole-v1", 16, NetworkConfig(hidden_sizes=(16,), torso="gru", recurrent_size=20, shared_torso=True)),
    ],
    ids=["blocks that overlap", "fewer than a vector", "memory in rows"],
)
@pytest.mark.slow_beyond(1)
def test_rollouts_are_those_of_the_program(name, num_envs, network):
    graph = ppo(make(name, max_steps=6), num_envs=num_envs, num_steps=8, num_minibatches=1, network=network)
    state = first_state(graph, jax.random.key(3), jnp.arange(num_envs))
    backend = cpu_backend()
    runs = run_reference, backend.rollouts.run(backend.rollouts.launches(num_envs, 0)[0])

    def both(state, key):
        weights = graph.weights(state.learner)
        return [fused_collect(graph, weights, state.collector, key, run=run) for run in runs]

    expected, found = jax.jit(both)(state, jax.random.key(1))
    assert int(expected[1].steps.truncated.sum()) > 0  # and so some begin again

    def assert_close(path, one, other):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(assert_close, found, expected)


def test_a_launch_must_fit():
    graph, backend = ppo(make("CartPole-v1"), num_envs=3, num_steps=6, num_minibatches=1), cpu_backend()

    def gradients(state, rows):
        learner, batch = first_batch(graph, state)
        return fused_gradients(graph, batch, identity, run=backend.gradients.run((4, 5)))(learner, rows)

    state = jax.eval_shape(partial(init_state, graph), jax.random.key(3), jnp.arange(3))
    with raises("programs-with-blocks-do-not", "5", "4", "16"):
        jax.eval_shape(gradients, state, jnp.arange(18, dtype=jnp.uint32))
    too_wide = {"device": describe_processor(), "rollouts": [16], "gradients": None}
    with raises("fusion-is-not-possible-auto", "rollout", "block of 16 does not fit 3 environments"):
        lower(graph, fusion="rollout", launches=too_wide)


def test_threads_may_make_the_same_code_at_a_time():
    x = jnp.asarray(arguments())
    both_begin = threading.Barrier(2)

    def grown(_):
        both_begin.wait(timeout=60)
        return computed(lambda emit, x: emit.add(x, emit.multiply(x, emit.constant(0.75))), x)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(grown, range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_sum_is_the_same_however_many_cores_make_it(monkeypatch):
    graph = ppo(make("CartPole-v1"), num_envs=8, num_steps=64, network=NetworkConfig(hidden_sizes=(16,)))

    def trained():
        program = lower(graph, fusion="full")
        return to_host(program.step(program.start())[0])

    two = trained()
    one_core = processor()._replace(cores=1)
    monkeypatch.setattr(ffi, "processor", lambda: one_core)
    one = trained()
    for name in two:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_calls_at_a_time_share_the_threads():
    """Calls whose helpers come late, or when they have ended, are right."""
    lanes, programs = processor().lanes, 32
    emit, (source, target), number, _ = new_program(lanes, 2)
    with emit.loop(1 << 10) as first:
        own = emit.builder.add(emit.builder.mul(number, emit.integer(1 << 10)), first)
        place = lambda pointer: emit.at(pointer, emit.builder.mul(own, emit.integer(lanes)), number_type(FLOAT32))
        emit.store(functions.exp(emit, emit.load(place(source), FLOAT32)), place(target), FLOAT32)
    emit.builder.ret_void()
    x = np.linspace(-3, 3, programs * lanes << 10, dtype=np.float32)
    kernel = NativeKernel(emit.module, programs, 64, (jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32)),))
    run = jax.jit(lambda x: call(kernel, [x])[0]).lower(x).compile()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: np.asarray(run(x)), range(60)))
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    np.testing.assert_allclose(found[0], np.exp(x), rtol=1e-6)
