"""`rollmill.to_gymnasium` and `to_pettingzoo`: environments of JAX functions for other libraries."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rollmill
from rollmill.core.errors import UsageError
from wordings import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*WARN")


def counting(limit=4):
    """The observation counts the steps, action 1 ends an episode, and it is cut at the limit."""

    def reset(key, params):
        return {"count": jnp.zeros((1,), jnp.float32), "odd": jnp.int32(0)}, jnp.int32(0)

    def step(key, state, action, params):
        new = state + 1
        observation = {"count": new[None].astype(jnp.float32), "odd": new % 2}
        return rollmill.Timestep(observation, new, 10 * new, action == 1, new >= limit, {"twice": 2 * new})

    space = spaces.Dict({"count": spaces.Box(0, 100, (1,)), "odd": spaces.Discrete(2)})
    return rollmill.Environment("Counting-v0", reset, step, space, spaces.Discrete(2))


def equal(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.mark.parametrize("env", ["Pendulum-v1", "DictGoal-v0"])
def test_gymnasium_finds_nothing_wrong(env):
    check_env(rollmill.to_gymnasium(env), skip_render_check=False)


def test_steps_are_those_of_gymnasium():
    ours, theirs = rollmill.to_gymnasium("CartPole-v1"), gymnasium.make("CartPole-v1").unwrapped
    observation, _ = ours.reset(seed=3)
    theirs.reset()
    theirs.state = observation.astype(np.float64)
    ended = False
    while not ended:
        action = int(observation[2] > 0)
        expected = theirs.step(action)
        observation, reward, ended, truncated, info = ours.step(action)
        np.testing.assert_allclose(observation, expected[0], rtol=1e-4, atol=1e-5)
        assert (reward, ended, truncated, info) == (expected[1], expected[2], False, {})
        assert observation.dtype == np.float32 and observation.flags.writeable
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\) to begin"):
        ours.step(0)


def test_a_seed_determines_all_episodes():
    env = rollmill.to_gymnasium("CartPole-v1")
    first, second = env.reset(seed=1)[0], env.reset()[0]
    assert not np.array_equal(first, second)
    other = rollmill.to_gymnasium("CartPole-v1")
    assert np.array_equal(first, other.reset(seed=1)[0]) and np.array_equal(second, other.reset()[0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vectors_are_those_of_gymnasium_in_each_mode(mode):
    """Beside Gymnasium's own vector of single environments, of which copy 1 ends early and copy 2 is cut."""
    singles = [lambda: rollmill.to_gymnasium(counting())] * 3
    theirs = SyncVectorEnv(singles, autoreset_mode=AutoresetMode(mode))
    ours = rollmill.to_gymnasium(counting(), 3, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] == AutoresetMode(mode)
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    assert equal(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])
    for t in range(12):
        actions = np.array([t == 9, t % 2, 0])
        (observation, *results, info), (their_observation, *expected, their_info) = (
            ours.step(actions),
            theirs.step(actions),
        )
        assert equal(observation, their_observation), t
        assert [list(one) for one in results] == [list(one) for one in expected], t
        assert ("final_obs" in info) == ("final_obs" in their_info)
        if "final_obs" in info:
            assert np.array_equal(info["_final_obs"], their_info["_final_obs"])
            for one, other in zip(info["final_obs"], their_info["final_obs"], strict=True):
                assert one is other is None or equal(one, other)


def test_disabled_resets_are_those_of_a_mask():
    env = rollmill.to_gymnasium(counting(), 2, autoreset_mode="Disabled")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(2, int))
    env.reset(seed=0)
    *_, info = env.step(np.array([0, 1]))
    assert info["twice"].tolist() == [2, 2] and info["_twice"].all()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(2, int))
    observation, _ = env.reset(options={"reset_mask": [False, True]})
    assert observation["count"].tolist() == [[1], [0]]
    observation, *_ = env.step(np.zeros(2, int))
    assert observation["count"].tolist() == [[2], [1]]


def test_parameters_with_a_distribution_are_drawn_for_each_episode():
    env = rollmill.to_gymnasium("Pendulum-v1", num_envs=8, gravity="uniform:1:20")
    before, _ = env.reset(seed=0)
    after, *_ = env.step(np.zeros((8, 1), np.float32))
    found = (after[:, 2] - before[:, 2]) / (0.05 * 1.5 * before[:, 1])  # the pendulum's acceleration by its angle
    assert found.min() >= 0.99 and found.max() <= 20.01 and found.std() > 1


def test_masks_are_in_the_infos():
    env = rollmill.to_gymnasium("Probe-ActionMask-v0")
    _, info = env.reset(seed=0)
    assert np.array_equal(env.action_masks(), info["action_mask"]) and info["action_mask"].any()
    _, info = rollmill.to_gymnasium("Probe-ActionMask-v0", 2).reset(seed=0)
    assert info["action_mask"].shape == (2, *env.action_masks().shape) and info["_action_mask"].all()


def test_a_state_is_drawn():
    env = rollmill.to_gymnasium("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape[2] == 3 and env.render().dtype == np.uint8


def test_actions_of_a_box_are_clipped_to_its_bounds():
    env = rollmill.to_gymnasium("Pendulum-v1")
    results = []
    for torque in (2.0, 50.0):
        env.reset(seed=0)
        results.append(env.step(np.array([torque], np.float32))[1])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (2, r"the action 2 is outside Discrete\(2\)"),
        (0.5, "must be an integer"),
        ([0], r"an action has the shape \(1,\), expected \(\) for Discrete\(2\)"),
    ],
)
def test_actions_outside_the_space_are_refused(action, said):
    env = rollmill.to_gymnasium(counting())
    env.reset(seed=0)
    with pytest.raises(UsageError, match=f"Counting-v0: .*{said}"):
        env.step(action)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (["gymnasium:CartPole-v1"], {}, "stepped by Python on the host"),
        (["TicTacToe-v0"], {}, "a two-player game"),
        (["TagGridWorld-Small-v0"], {}, "use rollmill.to_pettingzoo"),
        (["CartPole-v1"], {"autoreset_mode": "SameStep"}, "needs a vector environment"),
        (["CartPole-v1", 2], {"autoreset_mode": "same"}, "autoreset_mode"),
        (["CartPole-v1", 0], {}, "num_envs=0 must be at least 1"),
        (["CartPole-v1"], {"render_mode": "human"}, "it must be rgb_array"),
        (["CartPole-v1", 2], {"render_mode": "rgb_array"}, "needs a single environment"),
    ],
)
def test_what_cannot_be_offered_is_refused(arguments, options, said):
    with pytest.raises(UsageError, match=said):
        rollmill.to_gymnasium(*arguments, **options)


@pytest.mark.filterwarnings("ignore")
def test_pettingzoo_finds_nothing_wrong_and_rewards_are_the_environments():
    pytest.importorskip("pettingzoo", reason="it is the interface")
    from pettingzoo.test import parallel_api_test

    offered = rollmill.to_pettingzoo("TagGridWorld-Small-v0")
    parallel_api_test(offered, num_cycles=20)
    env = rollmill.make("TagGridWorld-Small-v0")
    drawn = np.random.default_rng(5).integers(0, 2**32, dtype=np.uint32)
    key, reset_key = jax.random.split(jax.random.key(drawn))
    observation, state = env.reset(reset_key, env.params)
    theirs, _ = offered.reset(seed=5)
    step = jax.jit(env.step)
    for _ in range(5):
        for kind in env.agents:
            for index in range(kind.count):
                np.testing.assert_array_equal(theirs[f"{kind.name}_{index}"], observation[kind.name][index])
        actions = {name: offered.action_space(name).sample() for name in offered.agents}
        theirs, rewards, *_ = offered.step(actions)
        batch = {
            kind.name: jnp.array([actions[f"{kind.name}_{index}"] for index in range(kind.count)], jnp.int32)
            for kind in env.agents
        }
        key, step_key = jax.random.split(key)
        observation, state, reward, *_ = step(step_key, state, batch, env.params)
        for kind in env.agents:
            expected = [rewards[f"{kind.name}_{index}"] for index in range(kind.count)]
            np.testing.assert_allclose(expected, reward[kind.name], rtol=1e-6)
    with raises("took-part-and-had-no"):
        offered.step({})
    with raises("action-has-shape-expected-for", "TagGridWorld-Small-v0", "(2,)", "()"):
        offered.step({**actions, offered.agents[0]: np.zeros(2, np.int32)})


def test_a_single_agent_is_not_for_pettingzoo():
    pytest.importorskip("pettingzoo", reason="it is the interface")
    with raises("has-single-agent-hint-rollmill"):
        rollmill.to_pettingzoo("CartPole-v1")
