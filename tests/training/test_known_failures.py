"""A training that is known to learn nothing says so before it starts."""

from types import SimpleNamespace

import pytest

import rollmill
from rollmill.training import preparing
from rollmill.training.known_failures import note_on_known_failure
from small_ppo import small_ppo

SMALL = {"num_envs": 4, "num_steps": 4, "total_timesteps": 16}


@pytest.mark.parametrize(
    ("algorithm", "environment"),
    [("ppo", "MountainCar-v0"), ("ppo", "MountainCarContinuous-v0"), ("dqn", "MountainCar-v0")],
)
def test_environments_without_a_signal_are_named_with_a_way_out(algorithm, environment):
    sizes = SMALL if algorithm == "ppo" else {}
    note = note_on_known_failure(getattr(rollmill, algorithm)(environment, **sizes))
    assert note is not None and note.startswith(f"note: {algorithm} is known to learn nothing on {environment}")
    remedy = "--recipe mountain-car" if environment == "MountainCar-v0" else "--rnd-coef 1"
    assert f"hint: use ppo {remedy}" in note and "a reward that grows on the way" in note


def test_values_of_thousands_are_named_with_options_that_scale_them():
    note = note_on_known_failure(rollmill.a2c("Pendulum-v1"))
    assert note is not None and "a2c is known to learn nothing on Pendulum-v1" in note
    assert "hint: --normalize-values --norm-adv" in note
    assert note_on_known_failure(rollmill.a2c("Pendulum-v1", normalize_values=True)) is None


def test_a_short_sighted_lander_is_told_of_a_recipe():
    def note(gamma):  # of a graph whose environment needs Box2D
        settings = {"algorithm": "ppo", "environment": "gymnasium:LunarLander-v3", "config": {"gamma": gamma}}
        return note_on_known_failure(SimpleNamespace(settings=settings))

    assert "hover on LunarLander-v3" in note(0.99) and "--recipe lunar-lander" in note(0.99)
    assert note(0.999) is None


def test_others_have_no_note():
    assert note_on_known_failure(rollmill.ppo("CartPole-v1", **SMALL)) is None
    assert note_on_known_failure(rollmill.ppo("MountainCar-v0", **SMALL, rnd_coef=1.0)) is None
    assert note_on_known_failure(rollmill.td3("MountainCarContinuous-v0")) is None
    normalised = {"normalize_observations": True, "normalize_rewards": True}
    assert note_on_known_failure(rollmill.ppo("MountainCar-v0", **SMALL, **normalised)) is None
    assert note_on_known_failure(rollmill.ppo("MountainCarContinuous-v0", **SMALL, **normalised)) is not None


def test_a_training_shows_the_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        preparing, "note_on_known_failure", lambda graph: f"note: no {graph.settings['environment']}"
    )
    rollmill.train(small_ppo(), run_dir=tmp_path / "run", tensorboard=False)
    assert "note: no CartPole-v1" in "".join(capsys.readouterr())
