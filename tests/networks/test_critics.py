"""Network settings that an algorithm or a torso does not read are refused."""

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


UNREAD_BY_TORSO = [
    ("auto", "recurrent_size", 8),
    ("mlp", "recurrent_size", 8),
    ("gru", "num_blocks", 2),
    ("auto", "channels", 8),
    ("cnn", "stages", (8, 8)),
    *((torso, "convolutions", ((4, 3, 1),)) for torso in ("mlp", "resnet", "impala")),
]
"""Torsos, and settings that other torsos read."""


@pytest.mark.parametrize("algorithm", ["actor-critic", "values"])
@pytest.mark.parametrize(("torso", "setting", "value"), UNREAD_BY_TORSO)
def test_settings_of_other_torsos_are_refused(algorithm, torso, setting, value):
    values = rollmill.r2d2 if torso == "gru" else rollmill.dqn
    algorithm = values if algorithm == "values" else rollmill.ppo
    with raises("has-no-effect-with-torso", f"{setting}={value}", f"torso='{torso}'", f"leave {setting} out"):
        algorithm("CartPole-v1", network=rollmill.NetworkConfig(torso=torso, **{setting: value}))


def test_a_registered_torso_has_a_recurrent_size_only_with_a_recurrent_unit():
    rollmill.register_network("double", lambda key, space: lambda observation: 2 * observation, torso=True)
    settings = {"name": "double", "hidden_sizes": (8,), "recurrent_size": 8}
    with raises("has-no-effect-with-torso", "recurrent_size=8", "torso='auto'"):
        rollmill.ppo("CartPole-v1", network=rollmill.NetworkConfig(**settings))
    rollmill.ppo("CartPole-v1", network=rollmill.NetworkConfig(torso="gru", **settings))


def test_a_recurrent_critic_of_actions_has_the_recurrent_size_that_is_asked_for():
    rollmill.rsac("Pendulum-v1", network=rollmill.NetworkConfig(torso="gru", recurrent_size=8))


def test_sac_begins_with_the_standard_deviation_that_is_asked_for():
    make("sac", "Pendulum-v1", initial_log_std=-1.0)
