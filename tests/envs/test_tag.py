"""Features of Tag that WarpDrive does not have: several runners, random starts, parameters, sizes, errors."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.core.spaces import sample
from rollmill.envs.tag_gridworld import TagGridWorldState

GRID, FIELD = "TagGridWorld-v0", "TagContinuous-v0"
STAY, RIGHT, LEFT, UP, DOWN = range(5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (GRID, {"num_taggers": 2, "num_runners": 3, "max_steps": 20, "random_start": True}),
        (GRID, {"use_full_observation": False, "num_runners": 2}),
        (FIELD, {"num_taggers": 2, "num_runners": 3, "num_other_agents_observed": 4, "max_steps": 20}),
        (
            FIELD,
            {"num_taggers": 2, "num_runners": 3, "num_other_agents_observed": 4, "use_full_observation": True},
        ),
    ],
)
@pytest.mark.slow_beyond(1)
def test_every_form_keeps_the_contract(name, options):
    envs.check_environment(envs.make(name, **options), num_steps=25)


def grid(cells, *, in_game=None, time=0):
    x, y = jnp.asarray(cells, jnp.int32).T
    in_game = jnp.ones(len(cells), bool) if in_game is None else jnp.asarray(in_game)
    return TagGridWorldState(x, y, in_game, jnp.int32(time))


def step_grid(env, state, *actions, **params):
    count = env.agents[0].count
    action = {"tagger": jnp.asarray(actions[:count]), "runner": jnp.asarray(actions[count:])}
    params = dataclasses.replace(env.params, **params)
    return jax.jit(env.step)(jax.random.key(0), state, action, params)


def test_several_runners_go_out_one_by_one():
    env = envs.make(GRID, num_taggers=2, num_runners=3, max_steps=10)
    before = grid([(5, 5), (9, 9), (6, 5), (5, 6), (0, 0)])
    caught = step_grid(env, before, RIGHT, UP, STAY, STAY, LEFT, grid_length=9)
    # Tagger 0 tags runner 0; tagger 1 and runner 2 walk into walls.
    np.testing.assert_allclose(caught.reward["tagger"], [10, 10 - 0.1], rtol=1e-6)
    np.testing.assert_allclose(caught.reward["runner"], [-5, 0.01, 0.01 - 0.1], rtol=1e-6)
    np.testing.assert_array_equal(env.active(caught.state, env.params)["runner"], [False, True, True])
    assert not caught.terminated and not caught.truncated
    np.testing.assert_array_equal(caught.observation["runner"][0, 20:25], [1, 1, 0, 1, 1])

    # Runner 0 neither moves nor is paid, and cannot be tagged again.
    after = step_grid(env, caught.state, STAY, DOWN, UP, STAY, STAY, grid_length=9)
    np.testing.assert_array_equal([after.state.x[2], after.state.y[2]], [6, 5])
    np.testing.assert_allclose(after.reward["runner"], [0, 0.01, 0.01], rtol=1e-6)
    np.testing.assert_allclose(after.reward["tagger"], [-0.01, -0.01], rtol=1e-6)


def test_two_tags_in_one_step_end_the_game_and_pay_twice():
    env = envs.make(GRID, num_taggers=1, num_runners=2, max_steps=10)
    last = step_grid(env, grid([(5, 5), (7, 5), (6, 6)]), RIGHT, LEFT, DOWN)
    np.testing.assert_allclose(last.reward["tagger"], [20])
    np.testing.assert_allclose(last.reward["runner"], [-5, -5])
    assert last.terminated and not last.truncated


def test_taggers_see_the_nearest_free_runner():
    env = envs.make(GRID, num_taggers=2, num_runners=2, max_steps=10, use_full_observation=False)
    cells = [(2, 2), (8, 8), (3, 2), (6, 6)]
    seen = step_grid(env, grid(cells), *[STAY] * 4, grid_length=10).observation
    np.testing.assert_allclose(seen["tagger"], [[0.2, 0.2, 0.3, 0.2, 0, 0.1], [0.8, 0.8, 0.6, 0.6, 0, 0.1]])
    np.testing.assert_allclose(seen["runner"], [[0.3, 0.2, 0.2, 0.2, 1, 0.1], [0.6, 0.6, 0.8, 0.8, 1, 0.1]])
    out = grid(cells, in_game=[True, True, False, True])
    seen = step_grid(env, out, *[STAY] * 4, grid_length=10).observation
    np.testing.assert_allclose(seen["tagger"][0, 2:4], [0.6, 0.6])


def test_the_clock_ends_both_games_for_good():
    for name in (GRID, FIELD):
        env = envs.make(name, num_taggers=1, num_runners=2, max_steps=3, **FEW[name])
        _, state = jax.jit(env.reset)(jax.random.key(1), env.params)
        ends, step = [], jax.jit(env.step)
        for _ in range(3):
            timestep = step(jax.random.key(0), state, still(env), env.params)
            state = timestep.state
            ends.append(bool(timestep.terminated))
        assert ends == [False, False, True] and not timestep.truncated
        assert all((rows[:, -1] == 1).all() for rows in timestep.observation.values())


FEW = {GRID: {}, FIELD: {"num_other_agents_observed": 2}}


def still(env):
    return jax.tree.map(jnp.zeros_like, sample(jax.random.key(0), env.action_space))


def many_resets(env, params, count):
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(jax.vmap(lambda key: env.reset(key, params)))(keys)


def test_random_starts_keep_off_the_walls():
    env = envs.make(GRID, num_taggers=50, random_start=True)
    params = dataclasses.replace(env.params, grid_length=6)
    _, state = many_resets(env, params, 20)
    assert set(np.unique(state.x[:, :50])) == set(np.unique(state.y[:, :50])) == {1, 2, 3, 4, 5}
    assert not state.x[:, 50].any() and not state.y[:, 50].any()
    _, centre = envs.make(GRID).reset(jax.random.key(0), envs.make(GRID).params)
    np.testing.assert_array_equal(centre.x, [50, 50, 50, 50, 0])


def test_starts_of_the_field_fill_it():
    env = envs.make(FIELD, num_taggers=1, num_runners=40, num_other_agents_observed=2)
    _, state = many_resets(env, env.params, 50)
    for place in (state.x, state.y):
        assert 0 <= place.min() < 0.2 and 19.8 < place.max() <= 20 and abs(place.mean() - 10) < 0.5
    assert len(np.unique(state.direction)) == 4 and not state.speed.any() and state.in_game.all()
    assert abs(np.corrcoef(state.x.ravel(), state.y.ravel())[0, 1]) < 0.1


def test_each_replica_has_its_own_parameters():
    env = envs.vectorise(envs.make(FIELD, num_taggers=1, num_runners=2, num_other_agents_observed=2), 2)
    both = dataclasses.replace(
        env.params,
        max_speed=jnp.asarray([1.0, 0.5]),
        accelerations=jnp.stack([jnp.full(21, 0.1), jnp.full(21, 9.0)]),
        grid_length=jnp.asarray([100.0, 1000.0]),
    )
    keys = jax.random.split(jax.random.key(0), 2)
    _, state = jax.jit(env.reset)(keys, both)
    actions = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), still(env))
    moved = jax.jit(env.step)(keys, state, actions, both).state
    np.testing.assert_allclose(moved.speed, [[0.1] * 3, [0.5] * 3])
    assert state.x[1].max() > 100
    far = np.hypot(moved.x - state.x, moved.y - state.y)
    np.testing.assert_allclose(far, [[0.1] * 3, [0.5] * 3], atol=1e-4)


def test_central_features_show_the_whole_game():
    env = envs.make(FIELD, num_taggers=1, num_runners=2, num_other_agents_observed=2, max_steps=4)
    _, state = env.reset(jax.random.key(2), env.params)
    state = eqx.tree_at(lambda s: (s.in_game, s.time), state, (jnp.asarray([True, False, True]), jnp.int32(2)))
    whole = env.central(state, env.params)
    diagonal = 20 * math.sqrt(2)
    np.testing.assert_allclose(whole[:6], np.concatenate([state.x, state.y]) / diagonal, rtol=1e-6)
    np.testing.assert_allclose(whole[12:15], state.direction / (2 * math.pi), rtol=1e-6)
    np.testing.assert_array_equal(whole[15:], [0, 1, 0.5])

    env = envs.make(GRID, num_taggers=1, num_runners=2, max_steps=4)
    whole = env.central(grid([(50, 0), (100, 25), (0, 75)], in_game=[True, False, True], time=1), env.params)
    np.testing.assert_allclose(whole, [0.5, 1, 0, 0, 0.25, 0.75, 0, 1, 0.25])


def test_a_thousand_agents_take_little_more_than_what_they_see():
    env = envs.make(FIELD, num_taggers=100, num_runners=900)
    observation, state = jax.eval_shape(env.reset, jax.random.key(0), env.params)
    assert observation["runner"].shape == (900, 71)
    program = jax.make_jaxpr(env.step)(jax.random.key(0), state, still(env), env.params)
    sizes = [math.prod(v.aval.shape) for eqn in equations(program.jaxpr) for v in eqn.outvars]
    assert max(sizes) <= 2**18 * 1.1 and len(sizes) > 100


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (GRID, {"num_taggers": 0}, "num_taggers=0 must be at least 1"),
        (GRID, {"num_runners": -1}, "num_runners=-1 must be at least 1"),
        (GRID, {"max_steps": 0}, "max_steps=0 must be at least 1"),
        (FIELD, {"num_runners": 0}, "num_runners=0 must be at least 1"),
        (FIELD, {"num_turn_levels": 0}, "num_turn_levels=0 must be at least 1"),
        (FIELD, {"num_taggers": 2, "num_runners": 3}, "num_other_agents_observed=10 must lie between 1 and 4"),
        (FIELD, {"num_other_agents_observed": 0}, "num_other_agents_observed=0 must lie between 1 and 109"),
        (FIELD, {"speed": 3}, "Its options are .*num_runners, num_taggers"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, options, message):
    with pytest.raises(UsageError, match=f"{name}.*{message}"):
        envs.make(name, **options)
