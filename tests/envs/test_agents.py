"""Transforms around environments of several agents, by value: who is paid what, and who is out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.errors import ContractError
from rollmill.core.spaces import contains, repeat_space, sample, struct
from rollmill.core.types import AgentKind, Environment, Timestep
from rollmill.envs.agents import active_agents, joint_spaces
from wordings import raises

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
    whole = repeat_space(spaces.Dict({"part": spaces.Tuple((space,))}), 4)
    found = struct(whole)["part"][0]
    assert (found.shape, found.dtype) == (shape, dtype) and isinstance(whole["part"][0], kind)
    drawn = sample(jax.random.key(1), whole)
    assert contains(whole, drawn)
    for one in drawn["part"][0]:
        assert contains(space, one)
    outside = jax.tree.map(lambda leaf: leaf.at[3].add(jnp.asarray(9, leaf.dtype)), drawn)
    assert not contains(whole, outside)


def changed_step(**fields):
    """A step whose result has some fields replaced by functions of the timestep."""
    inner = pets()

    def step(key, state, action, params):
        timestep = inner.step(key, state, action, params)
        return timestep._replace(**{name: new(timestep) for name, new in fields.items()})

    return step


def test_an_environment_of_several_agents_keeps_the_contract():
    envs.check_environment(pets(), num_steps=20)
    envs.check_environment(pets(active=None, central=None), num_steps=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": KINDS[:1]}, r".*elements of observation_space are .*\['dog'\].* use .*joint_spaces\(agents\)"),
        ({"agents": ()}, "active and central have no effect without agents"),
        ({"agents": (KINDS[0], KINDS[0])}, "agents are cat: 2, cat: 2, expected kinds with different names"),
        (
            {"agents": (KINDS[0]._replace(count=0), KINDS[1])},
            "agents are cat: 0, dog: 3, .*at least one agent each",
        ),
        (
            {"action_space": spaces.Dict({"cat": spaces.Discrete(3), "dog": spaces.Box(-1.0, 1.0, (3, 2))})},
            r".*elements of action_space are dict\(\['cat'\]: int32\[\].*, expected dict\(\['cat'\]: int32\[2\]",
        ),
        (
            {"step": changed_step(reward=lambda t: t.reward["dog"])},
            r"reward is float32\[3\], expected dict\(\['cat'\]: float32\[2\], \['dog'\]: float32\[3\]\)",
        ),
        (
            {"step": changed_step(reward=lambda t: {**t.reward, "cat": t.reward["cat"][:1]})},
            r"reward is dict\(\['cat'\]: float32\[1\], .* expected dict\(\['cat'\]: float32\[2\]",
        ),
        (
            {"step": changed_step(terminated=lambda t: t.reward["cat"] > 0)},
            r"terminated is bool\[2\], expected bool\[\]",
        ),
        (
            {"active": lambda state, params: {"cat": jnp.ones(3, bool)}},
            r"active returned dict\(\['cat'\]: bool\[3\]",
        ),
        (
            {"active": lambda state, params: {"cow": jnp.ones(2, bool)}},
            r"active returned .*\['cow'\].* expected one or more",
        ),
        ({"active": lambda state, params: jnp.ones(5, bool)}, r"active returned bool\[5\], expected one or more"),
        ({"central": lambda state, params: state["count"][None]}, r"central returned int32\[1\], .*float32\[feat"),
        (
            {"step": changed_step(reward=lambda t: {**t.reward, "dog": t.reward["dog"].at[1].set(jnp.nan)})},
            r"the reward\['dog'\] is \[ 1. nan  1.\] in step 0, expected a number",
        ),
        (
            {"action_mask": lambda state, params: {"cat": jnp.ones((2, 2), bool)}},
            r"action_mask returned dict\(\['cat'\]: bool\[2,2\]\), expected dict\(\['cat'\]: bool\[2,3\]\)",
        ),
        (
            {"action_mask": lambda state, params: {"dog": jnp.ones((3, 2), bool)}},
            r"action_mask returned dict\(\['dog'\]: .*, expected dict\(\['cat'\]: bool\[2,3\]\)",
        ),
        (
            {"action_mask": lambda state, params: {"cat": jnp.asarray([[True] * 3, [False] * 3])}},
            r"action_mask\['cat'\] allows no action before step 0",
        ),
    ],
)
def test_what_breaks_the_contract_is_named(changes, message):
    with pytest.raises(ContractError, match=f"Pets: {message}"):
        envs.check_environment(pets(**changes), num_steps=5)


def test_random_actions_of_several_agents_are_legal():
    legal = jnp.asarray([[True, False, True], [False, True, False]])

    def step(key, state, action, params):
        timestep = pets().step(key, state, action, params)
        obeyed = legal[jnp.arange(2), action["cat"]]
        return timestep._replace(reward={**timestep.reward, "cat": jnp.where(obeyed, jnp.float32(1), jnp.nan)})

    env = pets(step=step, action_mask=lambda state, params: {"cat": legal})
    envs.check_environment(env, num_steps=20)
    with raises("reward-is-in-step-expected", "['cat']"):
        envs.check_environment(env._replace(action_mask=None), num_steps=20)
