"""How much of a step of a host environment waits, as a plan search measures it."""

import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.plan_search import step_waits as waiting
from rollmill.plan_search.step_waits import waiting_share


class Robot(gymnasium.Env):
    """Two milliseconds a step, in the way of its class; it may take the legal action alone."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), self.info()

    def step(self, action):
        assert action == 2
        self.spend()
        return np.zeros(2, np.float32), 1.0, False, False, self.info()

    def info(self):
        return {"action_mask": np.array([False, False, True])}

    def spend(self):
        time.sleep(0.002)


class Simulated(Robot):
    def spend(self):
        ends = time.thread_time() + 0.002
        while time.thread_time() < ends:
            pass


class Half(Robot):
    def spend(self):
        Simulated.spend(self)
        time.sleep(0.002)


class Broken(Robot):
    def spend(self):
        raise RuntimeError("no connection")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(waiting, "MAX_SECONDS", 0.2)


def share(kind):
    return waiting_share(rollmill.ppo(rollmill.from_gymnasium(kind), num_envs=8, num_steps=8))


def test_steps_that_sleep_wait_and_steps_that_compute_do_not():
    robot, half, simulated = share(Robot), share(Half), share(Simulated)
    assert robot > 0.5 and simulated < 0.25 and simulated < half


@pytest.mark.parametrize("env", ["CartPole-v1", rollmill.from_gymnasium(Broken)], ids=["jax", "broken"])
def test_nothing_is_known_to_wait_in_jax_or_where_an_environment_fails(env):
    assert waiting_share(rollmill.ppo(env, num_envs=8, num_steps=8)) < 0.3
