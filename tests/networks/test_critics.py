"""Network settings that algorithms without an actor-critic do not read are refused."""

import pytest

import rollmill
from wordings import raises

ACTOR_CRITIC = {"shared_torso": True, "state_dependent_std": True, "squash_actions": True}
WITH_STD = {"initial_log_std": -1.0, "learn_std": False}
CODE = "has-no-effect-on-networks"


def make(algorithm, environment, **settings):
    torso = "gru" if algorithm in ("r2d2", "rsac") else "auto"
    return getattr(rollmill, algorithm)(environment, network=rollmill.NetworkConfig(torso=torso, **settings))


@pytest.mark.parametrize(
    ("algorithm", "environment"),
    [
        *(("sac", "Pendulum-v1"), ("sac", "CartPole-v1"), ("td3", "Pendulum-v1"), ("ddpg", "Pendulum-v1")),
        *(("rsac", "Pendulum-v1"), ("dqn", "CartPole-v1"), ("pqn", "CartPole-v1"), ("r2d2", "CartPole-v1")),
        *(("vdn", "TwoStepGame-v0"), ("qmix", "TwoStepGame-v0")),
    ],
)
@pytest.mark.parametrize("setting", ACTOR_CRITIC)
def test_settings_of_an_actor_critic_are_refused(algorithm, environment, setting):
    with raises(CODE, setting):
        make(algorithm, environment, **{setting: ACTOR_CRITIC[setting]})


@pytest.mark.parametrize(("algorithm", "environment"), [("td3", "Pendulum-v1"), ("dqn", "CartPole-v1")])
@pytest.mark.parametrize("setting", WITH_STD)
def test_settings_of_a_standard_deviation_are_refused_without_one(algorithm, environment, setting):
    with raises(CODE, setting):
        make(algorithm, environment, **{setting: WITH_STD[setting]})


def test_sac_begins_with_the_standard_deviation_that_is_asked_for():
    make("sac", "Pendulum-v1", initial_log_std=-1.0)
