"""EnvPool's environments in the same-step convention, beside Gymnasium's by value."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.errors import UsageError
from wordings import raises

GAMMA = 0.9


def cartpole_state(observation):
    return np.float64(observation)


def pendulum_state(observation):
    return np.array([np.arctan2(observation[1], observation[0]), observation[2]], np.float64)


@pytest.mark.parametrize(("name", "state_of"), [("CartPole-v1", cartpole_state), ("Pendulum-v1", pendulum_state)])
def test_each_step_is_the_one_gymnasium_makes_from_there(name, state_of):
    pytest.importorskip("envpool", reason="pip install 'rollmill[envpool]'")
    env = envs.make(f"envpool:{name}", num_threads=1, max_episode_steps=20)
    theirs = gymnasium.make(name).unwrapped
    assert (
        env.action_space == theirs.action_space and env.observation_space.shape == theirs.observation_space.shape
    )
    vector = env.start([0, 3, 5], seed=2, gamma=GAMMA)
    now, rng = vector.reset(), np.random.default_rng(0)
    returns, lengths, discounted = np.zeros(3), np.zeros(3, int), np.zeros(3)
    ends = compared = 0
    theirs.reset()
    for _ in range(45):
        actions = np.stack(
            [env.action_space.sample() if name == "Pendulum-v1" else rng.integers(2) for _ in range(3)]
        )
        step = vector.step(actions)
        lengths += 1
        for i in range(3):
            theirs.state, theirs.steps_beyond_terminated = state_of(now.observation[i]), None
            observation, reward, terminated, _, _ = theirs.step(actions[i])
            if abs(theirs.state[-1]) < 8 or name != "Pendulum-v1":  # EnvPool cuts its speed after using it
                np.testing.assert_allclose(step.info["final_observation"][i], observation, atol=2e-5)
                compared += 1
            np.testing.assert_allclose(step.reward[i], reward, atol=1e-4)
            limit = lengths[i] == 20
            # At the limit EnvPool does not tell whether the episode would have ended by itself.
            assert step.truncated[i] == limit and step.terminated[i] == (terminated and not limit)
        returns, discounted = returns + step.reward, GAMMA * discounted + step.reward
        np.testing.assert_allclose(step.info["episode_return"], returns, rtol=1e-5)
        np.testing.assert_array_equal(step.info["episode_length"], lengths)
        np.testing.assert_allclose(step.info["discounted_return"], discounted, rtol=1e-5)
        done = step.terminated | step.truncated
        same = (step.observation == step.info["final_observation"]).all(axis=-1)
        np.testing.assert_array_equal(same, ~done)
        returns, lengths, discounted = returns * ~done, lengths * ~done, discounted * ~done
        now, ends = step, ends + done.sum()
    assert ends >= 6 and compared > 100
    if name == "CartPole-v1":  # first states of episodes lie near upright
        assert np.abs(step.observation[done]).max(initial=0) <= 0.05
    vector.close()


def test_seeds_belong_to_the_number_of_an_environment():
    pytest.importorskip("envpool", reason="pip install 'rollmill[envpool]'")
    env = envs.make("envpool:CartPole-v1", num_threads=2, max_episode_steps=3)

    def observations(indices, **options):
        vector = env.start(indices, seed=2, **options)
        rows = [vector.reset().observation]
        rows += [vector.step(np.zeros(len(indices), np.int32)).observation for _ in range(4)]
        vector.close()
        return np.stack(rows)

    together = observations(range(4))
    np.testing.assert_array_equal(observations([2]), together[:, 2:3])
    assert np.unique(together[0]).size == together[0].size
    assert not np.isin(observations([2], generation=1), together).any()


def test_spaces_are_in_32_bits_and_unbounded_ones_infinite(tmp_path, monkeypatch):
    pytest.importorskip("envpool", reason="pip install 'rollmill[envpool]'")
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log into the directory it runs in
    cheetah = envs.make("envpool:HalfCheetah-v4", num_threads=1)
    assert cheetah.action_space == spaces.Box(-1.0, 1.0, (6,), np.float32)
    envs.check_environment(cheetah, num_steps=5)
    ball = envs.make("envpool:BallInCupCatch-v1", num_threads=1)
    unbounded = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    assert ball.observation_space == spaces.Dict({"position": unbounded, "velocity": unbounded})
    envs.check_environment(ball, num_steps=5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CartPole-v11", {}, "unknown EnvPool environment 'CartPole-v11'. Did you mean CartPole-v1"),
        ("CartPole-v1", {"length": 2}, "envpool:CartPole-v1 has no option 'length'"),
        ("CartPole-v1", {"batch_size": 2}, "the option batch_size is set by Rollmill"),
        ("KuhnPoker-v1", {}, "KuhnPoker-v1 has up to 2 players, but only single-player"),
    ],
)
def test_what_cannot_be_run_is_refused(name, options, message):
    pytest.importorskip("envpool", reason="pip install 'rollmill[envpool]'")
    with pytest.raises(UsageError, match=message):
        envs.make(f"envpool:{name}", **options)


def test_a_batch_of_another_size_is_refused_before_it_ends_the_process():
    pytest.importorskip("envpool", reason="pip install 'rollmill[envpool]'")
    vector = envs.make("envpool:CartPole-v1", num_threads=1).start(range(3), seed=0)
    vector.reset()
    with raises("actions-have-shape-actions-have", "(2,)"):
        vector.step(np.zeros(2, np.int32))
    assert vector.drain_failures() == []
    vector.close()
