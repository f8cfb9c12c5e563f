"""Names of environments, and what a wrong one answers."""

import importlib

import gymnasium
import numpy as np
import pytest

import rollmill
from registries import restored
from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.envs import probes, registry
from rollmill.runs.specification import describe
from wordings import raises


@pytest.fixture
def own_names():
    with restored(registry.ENVIRONMENTS):
        yield


def test_every_registered_environment_has_its_name_and_a_description():
    listed = envs.registered()
    assert [name for name, _ in listed] == sorted(name for name, _ in listed)
    assert {"CartPole-v1", "ConnectFour-v0", "TMaze-v0", "TicTacToe-v0", "DictGoal-v0"} <= {
        name for name, _ in listed
    }
    for name, description in listed:
        env = envs.make(name)
        assert isinstance(env, Environment) and env.name == name
        assert 20 < len(description) < 110 and "\n" not in description


def test_register_adds_and_refuses_a_taken_name(own_names):
    envs.register("Mine-v0", probes.constant_reward)
    made = envs.make("Mine-v0")
    assert made.name == "Mine-v0" and made.action_space == probes.constant_reward().action_space
    assert dict(envs.registered())["Mine-v0"].startswith(
        "Probe with one step, 2 actions, observation 0 and reward 1."
    )
    with raises("is-registered-already-take-another", "'Mine-v0'"):
        envs.register("Mine-v0", probes.action_reward)
    envs.register("Mine-v0", probes.action_reward, overwrite=True)
    assert envs.make("Mine-v0").action_space == probes.action_reward().action_space


@pytest.mark.parametrize("name", ["", "mine:Env-v0", "Mine v0", "-v0", "Mine\n"])
def test_register_refuses_names_that_make_could_not_find(name, own_names):
    with raises("cannot-register-name-is-one", "an environment"):
        envs.register(name, probes.constant_reward)


def test_register_refuses_what_is_no_name_and_no_function():
    with raises("cannot-register-name-must-be", "an environment", "int"):
        registry.ENVIRONMENTS.check(3, probes.constant_reward, overwrite=False)
    with raises("cannot-register-needs-function-makes", "an environment", "str"):
        registry.ENVIRONMENTS.check("Mine-v0", "probe", overwrite=False)


def test_make_passes_options_on_and_the_environment_carries_them():
    env = envs.make("TMaze-v0", length=2)
    assert (env.name, dict(env.options)) == ("TMaze-v0", {"length": 2})
    assert dict(envs.make("TMaze-v0").options) == {}


def test_a_factory_has_to_return_an_environment(own_names):
    envs.register("Wrong-v0", lambda: ())
    with raises("factory-returned-has-to-return", "Wrong-v0", "tuple"):
        envs.make("Wrong-v0")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        (
            "TMaze-v0",
            "lenght",
            ("has-no-option-options", "TMaze-v0", "'lenght'", "Did you mean length?", "length"),
        ),
        (
            "gymnax:CartPole-v1",
            "gravty",
            ("has-no-option-options", "Did you mean gravity?", "force_mag, gravity,", "max_steps"),
        ),
        (
            "gymnasium:CartPole-v1",
            "max_steps",
            ("has-no-option-options", "max_episode_steps, render_mode, sutton_barto_reward"),
        ),
        (
            "envpool:CartPole-v1",
            "max_steps",
            ("has-no-option-options", "base_path, ", "max_episode_steps, num_threads"),
        ),
    ],
)
def test_an_unknown_option_is_answered_with_the_known_ones(name, option, message):
    if name.startswith("envpool:"):
        pytest.importorskip("envpool")
    with raises(*message):
        envs.make(name, **{option: 2})


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("CraftaxClassic-v0", {"flat": "no"}, "flat='no'"),
        ("CraftaxClassic-v0", {"always_diamond": 0}, "always_diamond=0"),
        ("TagGridWorld-v0", {"use_full_observation": "off"}, "use_full_observation='off'"),
        ("gymnasium:HalfCheetah-v5", {"exclude_current_positions_from_observation": "no"}, "observation='no'"),
    ],
)
def test_a_flag_that_is_neither_true_nor_false_is_refused(name, options, told):
    if "Cheetah" in name:
        pytest.importorskip("mujoco")
    with raises("must-be-true-or-false", name, told):
        envs.make(name, **options)


def test_flags_of_numpy_are_flags():
    assert envs.make("CraftaxClassic-v0", flat=np.bool_(True)).observation_space.shape == (1345,)


def test_options_of_gymnax_are_its_parameters_too():
    env = envs.make("gymnax:CartPole-v1", gravity=5, max_steps_in_episode=7)
    assert (env.params.gravity, env.params.max_steps_in_episode) == (5.0, 7)
    with raises("has-to-be-type-as", "max_steps_in_episode", "'7'", "int", "500"):
        envs.make("gymnax:CartPole-v1", max_steps_in_episode="7")


def test_unknown_names_offer_the_nearest():
    with raises("unknown-name", "unknown environment 'CartPole-v0'. Did you mean CartPole-v1"):
        envs.make("CartPole-v0")
    with raises("unknown-name", "Others:", "envpool:ID, gymnasium:ID, gymnax:ID,", "pgx:ID"):
        envs.make("Xyzzy")


def test_unknown_prefixes_list_the_known():
    with raises("unknown-environment-prefix-hint-for", "'elevator:'", "Known: ale:ID", "gymnasium:elevator:ID"):
        envs.make("elevator:Elevator-v0")
    with raises("unknown-environment-prefix-hint-for", "'gymnasum:'. Did you mean gymnasium:ID?"):
        envs.make("gymnasum:CartPole-v1")


@pytest.mark.parametrize("name", ["LunarLander-v3", "lunarlander-v3"])
def test_an_environment_of_gymnasium_is_suggested_with_its_prefix(name):
    with raises("unknown-name", f"{name!r}. Did you mean gymnasium:LunarLander-v3?", "--import FILE.py"):
        envs.make(name)


def test_a_module_that_an_environment_names_is_to_be_imported_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elevator_module.py").write_text("raise SystemExit('was imported')")
    with pytest.raises(UsageError, match=r"gymnasium:elevator_module:E-v0: .*--import elevator_module\.py"):
        envs.make("gymnasium:elevator_module:E-v0")


def wrapped():
    return gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 3)


def test_gymnasium_environments_come_from_ids_objects_and_functions():
    by_id = envs.from_gymnasium("CartPole-v1", transforms=["reward-scale:0.5"])
    assert (by_id.name, dict(by_id.options)) == ("gymnasium:CartPole-v1", {"transforms": ["reward-scale:0.5"]})
    made = envs.from_gymnasium(gymnasium.make("CartPole-v1", max_episode_steps=4))
    assert (made.name, dict(made.options)) == ("gymnasium:CartPole-v1", {"max_episode_steps": 4})
    vector = envs.from_gymnasium(wrapped, transforms=["frame-stack:2"]).start([0, 1], seed=0)
    vector.reset()
    flags = [vector.step(np.zeros(2, np.int64)).truncated.tolist() for _ in range(4)]
    assert flags == [[False, False], [False, False], [True, True], [False, False]]
    assert (
        envs.from_gymnasium(wrapped).name == "wrapped" and envs.from_gymnasium(wrapped, name="Mine").name == "Mine"
    )


def test_algorithms_take_what_gymnasium_makes():
    sizes = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "num_minibatches": 2}
    assert describe(rollmill.ppo(gymnasium.make("CartPole-v1"), **sizes))["custom"] == []
    assert describe(rollmill.ppo(envs.from_gymnasium(wrapped), **sizes))["custom"] == ["environment"]


def test_gymnasium_environments_that_cannot_be_copied_are_refused():
    assert dict(envs.from_gymnasium(wrapped()).options) == {"max_episode_steps": 3}
    clipped = gymnasium.wrappers.ClipReward(gymnasium.make("CartPole-v1"), 0, 0.5)
    with raises("was-wrapped-after-was-made"):
        envs.from_gymnasium(clipped)
    single = gymnasium.make("CartPole-v1")
    env = envs.from_gymnasium(lambda: single)
    with raises("environment-failed-times-in-row", "returned the same environment twice"):
        env.start([0, 1], seed=0).reset()
    with raises("returned-has-to-return-gymnasium", "a int"):
        envs.from_gymnasium(lambda: 3)  # pyright: ignore[reportArgumentType]


OPTIONAL = {
    "brax:ant": "brax",
    "craftax:Craftax-Symbolic-v1": "craftax",
    "jaxmarl:SMAX": "jaxmarl",
    "playground:FishSwim": "mujoco_playground",
    "xminigrid:MiniGrid-Empty-5x5": "xminigrid",
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_missing_packages_name_their_extra(name, monkeypatch):
    real, prefix = importlib.import_module, name.partition(":")[0]

    def without(module, package=None):
        if module.partition(".")[0] == OPTIONAL[name]:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(module, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with raises("id-environments-need-package-is", prefix, "pip install", f"[{prefix}]"):
        envs.make(name)
