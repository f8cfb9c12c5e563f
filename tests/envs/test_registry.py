"""Names of environments, and what a wrong one answers."""

import pytest

from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.envs import probes, registry


@pytest.fixture
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def test_every_registered_environment_has_its_name_and_a_description():
    listed = envs.registered()
    assert [name for name, _ in listed] == sorted(name for name, _ in listed)
    assert {"CartPole-v1", "TMaze-v0", "Probe-Truncation-v0", "DictGoal-v0"} <= {name for name, _ in listed}
    for name, description in listed:
        env = envs.make(name)
        assert isinstance(env, Environment) and env.name == name
        assert 20 < len(description) < 110 and "\n" not in description


def test_register_adds_and_refuses_a_taken_name(own_names):
    envs.register("Mine-v0", probes.constant_reward)
    assert envs.make("Mine-v0").name == "Probe-ConstantReward-v0"
    assert dict(envs.registered())["Mine-v0"].startswith("Probe: reward 1 and the end")
    with pytest.raises(UsageError, match="'Mine-v0' is registered already; .*overwrite=True"):
        envs.register("Mine-v0", probes.action_reward)
    envs.register("Mine-v0", probes.action_reward, overwrite=True)
    assert envs.make("Mine-v0").name == "Probe-ActionReward-v0"


@pytest.mark.parametrize("name", ["", "mine:Env-v0"])
def test_register_refuses_names_that_make_could_not_find(name, own_names):
    with pytest.raises(UsageError, match="not empty and has no colon"):
        envs.register(name, probes.constant_reward)


def test_make_passes_options_on_and_names_unknown_ones():
    assert envs.make("TMaze-v0", length=2).name == "TMaze-v0"
    with pytest.raises(UsageError, match="TMaze-v0: .*'lenght'; its options: length"):
        envs.make("TMaze-v0", lenght=2)


def test_unknown_names_offer_the_nearest():
    with pytest.raises(UsageError, match=r"unknown environment 'CartPole-v0'. Did you mean CartPole-v1\b"):
        envs.make("CartPole-v0")
    with pytest.raises(UsageError, match="Others: envpool:ID, gymnasium:ID, gymnax:ID"):
        envs.make("Xyzzy")


def test_unknown_prefixes_list_the_known():
    with pytest.raises(UsageError, match="unknown environment prefix 'gym:'. Known: envpool:ID, gymnasium:ID"):
        envs.make("gym:CartPole-v1")
