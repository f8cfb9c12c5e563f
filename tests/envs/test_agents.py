"""Transforms around environments of several agents, by value: who is paid what, and who is out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.spaces import contains, repeated, sample, struct
from rollmill.core.types import AgentKind, Environment, Timestep
from rollmill.envs.agents import active_agents, joint_spaces

pytestmark = pytest.mark.usefixtures("fast_compilation")

LEVEL = spaces.Box(0.0, 100.0, (1,))
KINDS = (AgentKind("cat", 2, LEVEL, spaces.Discrete(3)), AgentKind("dog", 3, LEVEL, spaces.Box(-1.0, 1.0, (2,))))


def pets(*, end=4, **changes):
    """Counts to `end`. Step t pays cats [t, 10 t] and each dog 1; cat 1 goes out at count 2."""

    def observe(count):
        return {kind.name: jnp.full((kind.count, 1), count, jnp.float32) for kind in KINDS}

    def reset(key, params):
        return observe(0), {"count": jnp.int32(0)}

    def step(key, state, action, params):
        count = state["count"] + 1
        t = count.astype(jnp.float32)
        return Timestep(
            observation=observe(count),
            state={"count": count},
            reward={"cat": jnp.stack([t, 10 * t]) * params["scale"], "dog": jnp.ones(3, jnp.float32)},
            terminated=count >= end,
            truncated=jnp.asarray(False),
            info={},
        )

    def active(state, params):
        return {"cat": jnp.stack([params["scale"] > 0, state["count"] < 2])}

    def central(state, params):
        return params["scale"] * state["count"].astype(jnp.float32)[None]

    spaces_of_all = joint_spaces(KINDS)
    good = Environment(
        "Pets", reset, step, *spaces_of_all, {"scale": jnp.float32(1)}, None, KINDS, active, central
    )
    return good._replace(**changes)


def run(env, num_steps, params=None):
    params = env.params if params is None else params

    def one(state, key):
        timestep = env.step(key, state, sample(key, env.action_space), params)
        return timestep.state, timestep

    @jax.jit
    def go(key):
        _, state = env.reset(key, params)
        return jax.lax.scan(one, state, jax.random.split(key, num_steps))[1]

    return go(jax.random.key(0))


def test_returns_of_kinds_count_what_was_paid_to_active_agents():
    timestep = run(envs.record_episodes(envs.auto_reset(pets())), 6)
    np.testing.assert_array_equal(timestep.info["agent_returns"]["dog"], [1, 2, 3, 4, 1, 2])
    # Cat 0 gets 1, 2, 3, 4; cat 1, which is out after the second step, 10 and 20.
    cats = [11 / 2, 33 / 2, 36 / 2, 40 / 2, 11 / 2, 33 / 2]
    np.testing.assert_allclose(timestep.info["agent_returns"]["cat"], cats)
    everybody = (2 * np.array(cats) + 3 * np.array([1, 2, 3, 4, 1, 2])) / 5
    np.testing.assert_allclose(timestep.info["episode_return"], everybody, rtol=1e-6)
    np.testing.assert_array_equal(timestep.info["episode_length"], [1, 2, 3, 4, 1, 2])
    np.testing.assert_array_equal(timestep.terminated, [False] * 3 + [True] + [False] * 2)


def test_a_single_agent_has_no_returns_of_kinds():
    info = run(envs.record_episodes(envs.auto_reset(envs.make("CartPole-v1"))), 3).info
    assert set(info) == {"final_observation", "episode_return", "episode_length"}


def test_discounted_returns_are_kept_for_each_agent():
    timestep = run(envs.record_discounted_returns(envs.auto_reset(pets(end=3)), 0.5), 4)
    cats = [[1, 10], [2.5, 25], [4.25, 0], [1, 10]]
    np.testing.assert_array_equal(timestep.info["discounted_return"]["cat"], cats)
    np.testing.assert_array_equal(timestep.info["discounted_return"]["dog"][:, 0], [1, 1.5, 1.75, 1])


def test_auto_reset_and_time_limits_keep_final_observations_of_all_kinds():
    timestep = run(envs.auto_reset(envs.time_limit(pets(end=9), 2)), 3)
    np.testing.assert_array_equal(timestep.truncated, [False, True, False])
    np.testing.assert_array_equal(timestep.observation["dog"][:, 2, 0], [1, 0, 1])
    np.testing.assert_array_equal(timestep.info["final_observation"]["dog"][:, 2, 0], [1, 2, 1])


def test_active_and_central_follow_the_state_through_every_transform():
    varied = envs.vary(envs.time_limit(pets(), 9), lambda key, params: {"scale": -params["scale"]})
    env = envs.record_discounted_returns(envs.record_episodes(envs.auto_reset(varied)), 0.5)
    batch = envs.vectorise(env, 2)
    action = {"cat": jnp.zeros((2, 2), jnp.int32), "dog": jnp.zeros((2, 3, 2))}
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"scale": jnp.asarray([1.0, -3.0])}
    _, state = batch.reset(keys, params)
    state = batch.step(keys, batch.step(keys, state, action, params).state, action, params).state
    np.testing.assert_array_equal(batch.active(state, params)["cat"], [[False, False], [True, False]])
    np.testing.assert_array_equal(batch.central(state, params), [[-2.0], [6.0]])


def test_kinds_that_active_leaves_out_take_part():
    env = pets()
    active = active_agents(env, {"count": jnp.int32(5)}, env.params)
    np.testing.assert_array_equal(active["cat"], [True, False])
    np.testing.assert_array_equal(active["dog"], [True] * 3)
    assert active_agents(env._replace(active=None), None, None)["cat"].all()


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "kind"),
    [
        (spaces.Discrete(3, start=-1), (4,), jnp.int32, spaces.MultiDiscrete),
        (spaces.MultiDiscrete([[2, 3]], start=[[1, 0]]), (4, 1, 2), jnp.int32, spaces.MultiDiscrete),
        (spaces.MultiBinary(5), (4, 5), jnp.int8, spaces.MultiBinary),
        (
            spaces.Box(np.float32([0, -2]), np.float32([1, 3]), dtype=np.float32),
            (4, 2),
            jnp.float32,
            spaces.Box,
        ),
    ],
)
def test_repeated_spaces_have_one_more_axis_and_the_same_elements(space, shape, dtype, kind):
    whole = repeated(spaces.Dict({"part": spaces.Tuple((space,))}), 4)
    found = struct(whole)["part"][0]
    assert (found.shape, found.dtype) == (shape, dtype) and isinstance(whole["part"][0], kind)
    drawn = sample(jax.random.key(1), whole)
    assert contains(whole, drawn)
    for one in drawn["part"][0]:
        assert contains(space, one)
    outside = jax.tree.map(lambda leaf: leaf.at[3].add(jnp.asarray(9, leaf.dtype)), drawn)
    assert not contains(whole, outside)
