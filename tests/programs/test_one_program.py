"""The one-program backend: placement changes no numbers, nothing compiles twice, seeds are independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.programs.compiled import lower
from rollmill.programs.devices import take_devices
from rollmill.programs.dispatch import dispatch_ahead
from wordings import raises


def graph(env="CartPole-v1", make_graph=rollmill.ppo, **config):
    small = {"num_envs": 16, "num_steps": 16, "total_timesteps": 16 * 16 * 20, "learning_rate": 2.5e-4}
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    return make_graph(rollmill.make(env), **(small | {"network": network} | config))


def run(program, iterations=20, first=0, state=None):
    state = program.start() if state is None else state
    rows = []
    for window in dispatch_ahead(program, state, first=first, until=first + iterations):
        state = window.after
        rows += window.metrics
    return state, rows


def weights(state):
    return jax.tree.leaves(jax.device_get(state.learner.weights))


# At CleanRL's learning rate. At ten times that, the rounding of one update grows visibly in the next ones.
VARIANTS = {
    "discrete": {"num_minibatches": 2, "update_epochs": 2},
    "normalised": {"normalize_observations": True, "normalize_rewards": True, "normalize_values": True},
    "recurrent": {"network": rollmill.NetworkConfig(torso="gru")},
    "continuous": {"env": "Pendulum-v1"},
    "a3c": {
        "make_graph": rollmill.a3c,
        "normalize_observations": True,
        "normalize_rewards": True,
        "normalize_values": True,
    },
    "impala": {
        "make_graph": rollmill.impala,
        "num_minibatches": 2,
        "update_epochs": 2,
        "normalize_values": True,
        "network": rollmill.NetworkConfig(torso="gru"),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow_beyond(1)
def test_two_devices_give_the_numbers_of_one(variant):
    algorithm = graph(**VARIANTS[variant])
    (one, rows_one), (two, rows_two) = (run(lower(algorithm, devices=jax.devices()[:n])) for n in (1, 2))
    assert len(rows_one) == len(rows_two) == 20
    for alone, together in zip(weights(one), weights(two), strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    ended = [[row["episodes/ended"].item() for row in rows] for rows in (rows_one, rows_two)]
    assert ended[0] == ended[1]
    losses = [[row["losses/policy"].item() for row in rows] for rows in (rows_one, rows_two)]
    np.testing.assert_allclose(*losses, atol=1e-5)


def test_states_with_empty_arrays_are_divided_among_devices():
    def reset(key, params):
        position = jax.random.uniform(key, (2,))
        return position, (position, jnp.zeros((3, 0)))

    def step(key, state, action, params):
        position, none = state
        reward = -jnp.sum((position - action.astype(jnp.float32) / 4) ** 2) + none.sum()
        no = jnp.asarray(False)
        return rollmill.Timestep(position, (position, none + 1), reward, no, no, {})

    observations = spaces.Box(0.0, 1.0, (2,), np.float32)
    env = rollmill.Environment("Guess-v0", reset, step, observations, spaces.Discrete(4))
    small = {"num_envs": 16, "num_steps": 16, "total_timesteps": 16 * 16 * 4, "learning_rate": 2.5e-4}
    network = rollmill.NetworkConfig(hidden_sizes=(16,))
    algorithm = rollmill.ppo(rollmill.time_limit(env, 5), network=network, **small)
    one, two = (lower(algorithm, devices=jax.devices()[:n]) for n in (1, 2))
    (alone, _), (together, _) = run(one, iterations=4), run(two, iterations=4)
    for mine, ours in zip(weights(alone), weights(together), strict=True):
        np.testing.assert_allclose(ours, mine, rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(together) == jax.tree.structure(alone)
    empty = [leaf for leaf in jax.tree.leaves(together) if leaf.size == 0]
    assert [leaf.shape for leaf in empty] == [(16, 3, 0)]
    assert [shard.data.shape for shard in empty[0].addressable_shards] == [(8, 3, 0)] * 2


def test_environments_lie_on_both_devices_and_the_learner_on_each():
    state = lower(graph(), devices=jax.devices()[:2]).start()
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {2}
    assert not state.collector.observation.sharding.is_fully_replicated
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.learner))


@pytest.mark.slow
def test_seeds_trained_together_are_the_seeds_trained_alone():
    algorithm = graph()
    together, _ = run(lower(algorithm, seeds=(3, 4)), iterations=5)
    for position, seed in enumerate((3, 4)):
        alone, _ = run(lower(algorithm, seeds=(seed,)), iterations=5)
        for mine, ours in zip(weights(alone), weights(together), strict=True):
            np.testing.assert_allclose(ours[position], mine, atol=1e-5)


@pytest.mark.slow
def test_several_recurrent_seeds_start():
    algorithm = graph(network=rollmill.NetworkConfig(torso="gru"))
    state = lower(algorithm, seeds=(0, 1)).start()  # batched QR once hung XLA's CPU backend here
    assert all(np.isfinite(leaf).all() for leaf in weights(state))


@pytest.mark.slow
def test_different_seeds_differ():
    first, second = (run(lower(graph(), seeds=(seed,)), iterations=1)[0] for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def test_an_iteration_never_compiles_again():
    program = lower(graph())
    state, _ = run(program, iterations=2)
    with jax.log_compiles(), pytest.raises(TypeError):
        program.step(jax.tree.map(lambda leaf: leaf[None], state))  # another shape is refused, not compiled
    before = jax.jit(lambda: 0)  # the counter below sees compilations of this process
    before()
    with _no_compilation():
        run(program, iterations=3, first=2, state=state)


class _no_compilation:
    """Fails if XLA is asked to compile anything inside the block."""

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.compiled = []
        return self

    def _listen(self, event, duration, **_):
        if "backend_compile" in event:
            self.compiled.append(event)

    def __exit__(self, kind, error, trace):
        jax.monitoring.clear_event_listeners()
        assert not self.compiled


def test_the_compilation_counter_sees_compilations():
    counter = _no_compilation()
    counter.__enter__()
    jax.jit(lambda x: x * 3.25 + 17)(1.5)
    with pytest.raises(AssertionError):
        counter.__exit__(None, None, None)


def test_a_rollout_continues_where_it_was_cut():
    algorithm = graph()
    program = lower(algorithm)
    whole, rows = run(program, iterations=6)
    half, first_rows = run(program, iterations=3)
    rest, last_rows = run(program, iterations=3, first=3, state=half)
    assert all(np.array_equal(a, b) for a, b in zip(weights(whole), weights(rest), strict=True))
    assert [r["losses/total"].item() for r in rows] == [r["losses/total"].item() for r in first_rows + last_rows]


def test_devices_that_do_not_divide_the_shards():
    algorithm = graph(num_envs=3, num_steps=16, num_minibatches=4, total_timesteps=480)
    with raises("devices-cannot-hold-equal-shares", "2", "1", "1"):
        lower(algorithm, devices=jax.devices()[:2])


def test_too_few_devices():
    with raises("devices-but-there-are-platform", "64", "2", "cpu", "For CPU devices"):
        take_devices(64)
    assert len(take_devices(0)) == 2
