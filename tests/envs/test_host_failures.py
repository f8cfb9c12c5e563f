"""Host environments that raise: the batch goes on, and says so."""

import re
import sys

import host_cases
import jax
import numpy as np
import pytest

from rollmill import envs
from rollmill.core.errors import ContractError, EnvironmentFailed, NonFiniteError
from rollmill.core.types import HostFailure
from rollmill.envs.host import environment_seed
from rollmill.workers.replica.env_client import FailureStreaks
from wordings import raises

NO_OP = np.zeros(3, np.int32)


class Fragile(host_cases.Script):
    """Does what `fails(self, doing)` says before it steps, resets and closes."""

    fails = staticmethod(lambda env, doing: None)

    def reset(self, *, seed=None, options=None):
        self.resets = getattr(self, "resets", 0) + 1
        self.fails(self, "reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.fails(self, "step")
        return super().step(action)

    def close(self):
        super().close()
        self.fails(self, "close")


def started(fails, indices=(7, 8, 9)):
    """A vector of fragile environments, after its reset; and all the environments that were ever made."""
    made = []
    env = envs.host_environment("Fragile", host_cases.keeping(made, Fragile, fails=fails))
    made.clear()
    vector = env.start(indices, seed=1)
    return vector, vector.reset(), made


def test_an_environment_that_raises_is_replaced_and_its_episode_truncated():
    def fails(env, doing):
        if doing == "step" and len(made) == 3 and env is made[1] and env.count == 2:
            raise RuntimeError("the arm fell off\nand more")
        if doing == "close":
            raise OSError("cannot even close")

    made = []
    vector, _, made = started(fails)
    seeds = vector.seeds
    two = [vector.step(np.ones(3, np.int32)) for _ in range(2)]
    step = vector.step(np.ones(3, np.int32))
    assert step.truncated.tolist() == [False, True, False] and not step.terminated.any()
    assert step.reward.tolist() == [1, 0, 1]
    assert step.observation[:, 0].tolist() == [3, 0, 3]
    np.testing.assert_array_equal(step.info["final_observation"][1], two[1].observation[1])
    assert step.info["episode_return"].tolist() == [3, 2, 3]
    assert step.info["episode_length"].tolist() == [3, 3, 3]

    (failure,) = vector.drain_failures()
    assert (failure.index, failure.doing, failure.seed) == (8, "step", seeds[1])
    assert failure.error == "RuntimeError: the arm fell off"
    assert 'raise RuntimeError("the arm fell off' in failure.line and "test_host_failures.py" in failure.line
    assert made[1].closed and len(made) == 4 and vector.drain_failures() == []

    assert vector.seeds == (seeds[0], environment_seed(1, 8, attempt=1), seeds[2])
    first_draw = np.random.default_rng(vector.seeds[1]).random()
    assert step.observation[1, 1] == np.float32(first_draw)
    after = vector.step(np.ones(3, np.int32))
    assert after.observation[:, 0].tolist() == [4, 1, 4]
    assert after.info["episode_return"].tolist() == [4, 1, 4]


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_final_observation_of_a_failure_is_that_of_the_step_before_in_arrays_that_are_used_again(buffers):
    def fails(env, doing):
        if doing == "step" and env.count == 3:
            raise RuntimeError

    vector, first, made = started(fails)
    outs = [jax.tree.map(np.copy, first) for _ in range(buffers)]
    seen = [np.copy(vector.reset(out=outs[0]).observation)]
    for n in range(1, 5):
        step = vector.step(np.zeros(3, np.int32), out=outs[n % buffers])
        failed = n == 4  # the fourth step of each, which is truncated
        np.testing.assert_array_equal(step.truncated, [failed] * 3)
        final = step.info["final_observation"]
        assert final[:, 0].tolist() == [3.0 if failed else n] * 3
        assert step.observation[:, 0].tolist() == [0.0 if failed else n] * 3
        if failed:
            np.testing.assert_array_equal(final, seen[-1])
        seen.append(np.copy(step.observation))
    before = np.copy(step.observation)
    vector.reset()  # to other arrays
    np.testing.assert_array_equal(step.observation, before)


def test_a_tuple_of_another_length_is_a_failure():
    class Longer(host_cases.Parts):
        def observe(self):
            observation = super().observe()
            return observation | {"pair": (*observation["pair"], 0.0)} if self.given else observation

    vector = envs.host_environment("Longer", Longer).start([0], seed=0)
    vector.reset()
    action = {"push": np.zeros((1, 2)), "switch": (np.ones(1, int), np.zeros((1, 2), int))}
    assert vector.step(action).truncated.all()
    assert "an observation has 3 parts, expected a Tuple of " in vector.drain_failures()[0].error


def test_a_reset_that_raises_leaves_the_ended_episode_as_it_was():
    def fails(env, doing):
        if doing == "reset" and env.resets == 2:
            raise ValueError("no second episode")

    vector, _, made = started(fails)
    step = vector.step(np.array([0, host_cases.TERMINATE, host_cases.TRUNCATE]))
    assert step.terminated.tolist() == [False, True, False] and step.truncated.tolist() == [False, False, True]
    assert step.reward.tolist() == [0, 2, 3]
    assert step.info["final_observation"][:, 0].tolist() == [1, 1, 1] and step.observation[:, 0].tolist() == [
        1,
        0,
        0,
    ]
    assert [(f.index, f.doing) for f in vector.drain_failures()] == [(8, "reset"), (9, "reset")]
    assert len(made) == 5


def test_making_it_may_take_several_tries():
    tries = []

    def make():
        tries.append(1)
        if 2 <= len(tries) <= 5:
            raise ConnectionError(f"try {len(tries)}")
        return host_cases.Script()

    vector = envs.host_environment("Shy", make).start([0], seed=1)
    vector.reset()
    assert [f.error for f in vector.drain_failures()] == [f"ConnectionError: try {t}" for t in (2, 3, 4, 5)]
    assert vector.seeds == (environment_seed(1, 0, attempt=4),)


def test_one_that_cannot_be_begun_is_given_up_with_its_line():
    def make():
        if alive:
            return host_cases.Script()
        raise ConnectionError("nobody there")

    alive = [True]
    env = envs.host_environment("Gone", make)
    alive.clear()
    message = (
        "environment-failed-times-in-row",
        "Gone",
        "4",
        "5",
        "make",
        "ConnectionError: nobody there",
        "raise Conn",
    )
    with raises(*message):
        env.start([4], seed=0).reset()


def test_one_that_never_makes_a_whole_step_is_given_up():
    def fails(env, doing):
        if doing == "step":
            raise KeyError("wheel")

    vector, _, _ = started(fails, indices=[0])
    for _ in range(4):
        vector.step(NO_OP[:1])
    with raises("environment-failed-times-in-row", "0", "5", "step"):
        vector.step(NO_OP[:1])


def test_one_that_makes_whole_steps_in_between_is_not_given_up():
    def fails(env, doing):
        if doing == "step" and env.count == 1:
            raise KeyError("wheel")

    vector, _, made = started(fails, indices=[0])
    for _ in range(20):
        vector.step(NO_OP[:1])
    assert len(vector.drain_failures()) == 10 and len(made) == 11


@pytest.mark.parametrize("wrong", [np.zeros(1), 0.0, None, np.zeros((2, 1))])
def test_an_observation_of_another_shape_is_a_failure(wrong):
    class Shapeless(host_cases.Script):
        def step(self, action):
            return wrong if self.count else super().step(action)[0], 1.0, False, False, {}

    vector = envs.host_environment("Shapeless", Shapeless).start([0], seed=0)
    vector.reset()
    before = vector.step(NO_OP[:1])
    step = vector.step(NO_OP[:1])
    assert step.truncated.all() and step.reward == 0
    np.testing.assert_array_equal(step.info["final_observation"], before.observation)
    assert "ValueError: an observation has the shape" in vector.drain_failures()[0].error


def test_an_observation_with_one_wrong_part_is_not_half_written():
    make = host_cases.keeping([], host_cases.Parts, broken_after=1)
    vector = envs.host_environment("Parts", make).start([0], seed=0)
    vector.reset()
    action = {"push": np.zeros((1, 2)), "switch": (np.ones(1, int), np.zeros((1, 2), int))}
    vector.step(action)
    step = vector.step(action)
    assert step.info["final_observation"]["image"].max() == 1 and step.truncated.all()
    assert "shape (3,), expected () by the observation space" in vector.drain_failures()[0].error


def test_what_is_no_timestep_is_a_failure():
    class Old(host_cases.Script):
        def step(self, action):
            return super().step(action)[:4]

    vector = envs.host_environment("Old", Old).start([0], seed=0)
    vector.reset()
    assert vector.step(NO_OP[:1]).truncated.all()
    assert "step returned 4 values" in vector.drain_failures()[0].error


# --- environments that exit the program ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("doing", "ended", "shown"),
    [
        ("step", 3, "exit(3)"),
        ("reset", "the engine fell", "exit('the engine fell')"),
        ("step", None, "exit()"),
    ],
)
def test_one_that_exits_ends_the_batch_with_its_name(doing, ended, shown):
    def fails(env, now):
        if now == doing and getattr(env, "resets", 0) == 2:
            sys.exit(ended)
        if now == "close":
            sys.exit("and again")

    vector, _, made = started(fails)
    seed, actions = vector.seeds[1], np.array([0, host_cases.TERMINATE, 0])
    message = (
        rf"Fragile: environment 8, whose seed is {seed}, exited in its {doing}, by sys.{re.escape(shown)}\n.*py:"
    )
    with pytest.raises(EnvironmentFailed, match=message):
        for _ in range(2):
            vector.step(actions)
    vector.close()
    assert made[1].closed


def test_one_that_exits_when_it_is_made_is_named():
    with raises("raised-at", "Gone", "making it", "SystemExit: 4", "sys.exit(4)"):
        envs.host_environment("Gone", lambda: sys.exit(4))


def test_one_that_exits_keeps_the_contract_of_nobody():
    class Leaving(host_cases.Script):
        def step(self, action):
            sys.exit(5)

    with raises("by-sys-exit-at-hint", "exited in its step", "5", kind=ContractError):
        envs.check_environment(envs.host_environment("Leaving", Leaving))


# --- numbers that are not finite -----------------------------------------------------------------------


class Dividing(host_cases.Script):
    """Gives a number that is not finite, where `gives` says so: (episode, step, field)."""

    gives = staticmethod(lambda env: None)

    def reset(self, *, seed=None, options=None):
        self.episode = getattr(self, "episode", -1) + 1
        observation, info = super().reset(seed=seed)
        return self.spoilt(observation), info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return self.spoilt(observation), np.inf if self.gives(self) == "reward" else reward, *rest

    def spoilt(self, observation):
        if self.gives(self) == "observation":
            observation = np.array(observation, np.float32)
            observation[1] = np.nan
        return observation


@pytest.mark.parametrize(
    ("field", "episode", "step", "said"),
    [
        ("observation", 0, 2, r"environment 8 returned observation\[1\] = nan at step 2 of its episode"),
        ("reward", 0, 1, r"environment 8 returned reward = inf at step 1 of its episode"),
        ("observation", 1, 0, r"environment 8 returned observation\[1\] = nan when it was reset"),
    ],
)
def test_a_number_that_is_not_finite_is_named_with_environment_step_and_field(field, episode, step, said):
    def gives(env):
        here = len(made) == 3 and env is made[1] and (env.episode, env.count) == (episode, step)
        return field if here else None

    made = []
    env = envs.host_environment("Dividing", host_cases.keeping(made, Dividing, gives=gives))
    made.clear()
    vector = env.start([7, 8, 9], seed=1)
    vector.reset()
    action = np.full(3, host_cases.TERMINATE if episode else 1, np.int32)
    with pytest.raises(NonFiniteError, match=rf"^Dividing: {said}, with the seed {vector.seeds[1]}"):
        for _ in range(3):
            vector.step(action)


# --- failures in a row ----------------------------------------------------------------------------------


def failure(index, doing="step"):
    return HostFailure(index, doing, "ValueError: no", "env.py:3: raise", 0)


def test_failures_of_one_environment_with_no_whole_episode_in_between_are_too_many():
    streaks, none = FailureStreaks([4, 5], 2), np.zeros(2, bool)
    for _ in range(2):
        streaks.count([failure(5)], np.array([False, True]))
        streaks.count([failure(4)], np.array([True, False]))
        streaks.count([], np.array([True, False]))  # a whole episode of the other
        streaks.count([], none)
    with pytest.raises(EnvironmentFailed) as caught:
        streaks.count([failure(5)], np.array([False, True]))
    assert str(caught.value) == (
        "environment 5 failed 3 times without a complete episode in between, most recently in its step: "
        "ValueError: no\n"
        "  at env.py:3: raise\n"
        "hint: fix the environment, or allow more failures in a row with --max-failures (now 2)."
    )


def test_a_reset_that_fails_after_a_whole_episode_is_the_first_in_a_row():
    streaks = FailureStreaks([0], 1)
    for _ in range(5):
        streaks.count([failure(0, "reset")], np.array([True]))
    with raises("environment-failed-times-with-no", "2", "reset"):
        streaks.count([failure(0, "reset")], np.array([False]))


def test_failures_of_the_first_reset_count():
    with raises("environment-failed-times-with-no", "3", "1"):
        FailureStreaks([3], 0).count([failure(3, "make")], None)
