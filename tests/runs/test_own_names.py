"""Algorithms and networks of one's own have names: runs record them, and other processes make them."""

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import rollmill
from registries import restored
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.shell import command
from rollmill.dataflow import PolicyOutputs, fingerprint
from rollmill.envs import registry as environment_registry
from rollmill.networks import actor_critic, registry
from rollmill.planning.choose import place_custom
from rollmill.runs import algorithms
from rollmill.runs.custom_names import note_of_unknown, only_here, with_own_modules
from rollmill.runs.specification import describe, import_modules, rebuild_graph
from rollmill.sweeps.creation import NewSweep, create_sweep
from rollmill.sweeps.search_space import listed_axis
from rollmill.training.placing import choose_plan, place_parts
from rollmill.training.request import TrainingRequest
from wordings import raises

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))
import own_algorithm  # noqa: E402

sys.path.pop(0)
pytestmark = pytest.mark.usefixtures("own_names")

SIZES = {"num_envs": 4, "num_steps": 4, "total_timesteps": 64, "num_minibatches": 2, "update_epochs": 2}


@pytest.fixture
def own_names():
    with restored(algorithms.ALGORITHMS, registry.NETWORKS, environment_registry.ENVIRONMENTS):
        yield


@dataclass(frozen=True)
class Config:
    """Hyperparameters of the algorithm below."""

    learning_rate: float = 0.1
    sizes: tuple[int, ...] = (8, 8)
    limit: float = float("inf")
    iterations: int = 3


def reinforce(env, config):
    """REINFORCE with a baseline."""
    num_envs, num_steps = config.sizes
    rest = {"iterations": config.iterations, "learning_rate": config.learning_rate}
    return own_algorithm.reinforce(env, num_envs=num_envs, num_steps=num_steps, **rest)


def tiny(key, observation_space, action_space):
    """A small network."""
    return actor_critic(key, observation_space, action_space, rollmill.NetworkConfig(hidden_sizes=(3,)))


def tiny_of_agents(key, observation_space, action_space, critic_space):
    config = rollmill.NetworkConfig(hidden_sizes=(3,))
    return actor_critic(key, observation_space, action_space, config, critic_space=critic_space)


def test_a_registered_algorithm_is_recorded_trained_and_built_again(tmp_path):
    make_graph = rollmill.register_algorithm("reinforce", reinforce, Config)
    graph = make_graph("CartPole-v1", learning_rate=0.3, sizes=(4, 4))
    described = describe(graph)
    assert (described["algorithm"], described["custom"]) == ("reinforce", [])
    assert described["config"]["learning_rate"] == 0.3 and described["config"]["limit"] == "inf"
    assert fingerprint(rebuild_graph(described)) == described["fingerprint"]
    run = rollmill.train(graph, run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    assert rollmill.evaluate(run.directory, episodes=2).returns.shape == (2,)


def test_an_algorithm_without_a_name_is_told_from_its_environment():
    settings = reinforce(rollmill.make("CartPole-v1"), Config()).settings
    graph = reinforce(rollmill.make("CartPole-v1"), Config())._replace(settings={**settings, "custom": []})
    assert describe(graph)["custom"] == ["algorithm"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", ("is-registered-already-take-another", "'ppo'")),
        ("", ("cannot-register-name-is-one",)),
        ("my algo", ("cannot-register-name-is-one",)),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(name, message):
    with raises(*message):
        rollmill.register_algorithm(name, reinforce, Config)


@dataclass(frozen=True)
class NoDefault:
    size: int


@dataclass(frozen=True)
class WithFunction:
    activation: object = field(default=jnp.tanh)


@dataclass
class Changeable:
    size: int = 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Changeable, ("cannot-register-can-be-changed", "@dataclass(frozen=True)")),
        (dict, ("cannot-register-config-has-to",)),
        (NoDefault, ("cannot-register-file-has-to", "NoDefault", "missing 1 required")),
        (WithFunction, ("cannot-register-file-has-to", "WithFunction", "cannot be represented in JSON")),
    ],
)
def test_a_configuration_that_no_file_can_hold_is_refused(config, message):
    with raises(*message):
        rollmill.register_algorithm("mine", reinforce, config)


@dataclass(frozen=True)
class Sizes:
    total_timesteps: int = 64
    num_envs: int = 4
    num_steps: int = 4


def with_sizes(env, config):
    iterations = -(-config.total_timesteps // (config.num_envs * config.num_steps))
    sizes = {"num_envs": config.num_envs, "num_steps": config.num_steps, "iterations": iterations}
    return own_algorithm.reinforce(env, **sizes)


@pytest.mark.parametrize("sizes", [{"num_envs": -3}, {"num_envs": 0}, {"num_steps": 0}, {"total_timesteps": 0}])
def test_sizes_of_an_own_algorithm_are_checked_before_it_is_built(sizes, tmp_path):
    make_graph = rollmill.register_algorithm("mine", with_sizes, Sizes)
    (name, size), *_ = sizes.items()
    with raises("must-be-at-least-1", f"{name}={size}"):
        make_graph("CartPole-v1", **sizes)
    axes = (listed_axis(name.replace("_", "-"), [size, 4]),)
    with raises("must-be-at-least-1", "trial", f"{name}={size}", kind=UsageError):
        create_sweep(NewSweep(TrainingRequest("mine", "CartPole-v1", {}), axes, directory=tmp_path / "sweep"))


def test_sizes_of_an_own_graph_are_checked_when_it_is_built():
    make_graph = rollmill.register_algorithm("mine", with_sizes, Sizes)
    with raises("num-shards-in-graphs-loops", "mine: num_shards=4", "num_envs=3"):
        make_graph("CartPole-v1", num_envs=3)


def test_a_host_environment_is_refused_by_an_algorithm_for_environments_in_jax():
    make_graph = rollmill.register_algorithm("mine", with_sizes, Sizes)
    with raises("is-host-environment-but-this", "gymnasium:CartPole-v1", "prepare_off_policy"):
        make_graph("gymnasium:CartPole-v1")


def test_outputs_with_exchanged_arguments_are_refused_before_training():
    def with_value(value):
        return lambda env, config: with_sizes(env, config)._replace(outputs=PolicyOutputs(value=value))

    def exchanged(weights, observation, memory):
        return (observation @ weights["slope"])[0]

    def in_order(weights, memory, observation):
        return exchanged(weights, observation, memory)

    with raises("hint-outputs-is-called-as", "mine: outputs.value raised", "(weights, memory, observation)"):
        rollmill.register_algorithm("mine", with_value(exchanged), Sizes)("CartPole-v1")
    assert rollmill.register_algorithm("other", with_value(in_order), Sizes)("CartPole-v1").outputs.value
    with raises("takes-but-is-called-with", "third: outputs.value", "(weights, memory, observation)"):
        rollmill.register_algorithm("third", with_value(lambda weights: 0.0), Sizes)("CartPole-v1")


def test_mistakes_of_a_builder_are_told_with_its_line():
    make_graph = rollmill.register_algorithm("mine", lambda env, config: env.nothing, Config)
    with pytest.raises(ContractError, match=r"(?s)the algorithm mine raised AttributeError.*test_own_names.py"):
        make_graph("CartPole-v1")
    make_graph = rollmill.register_algorithm("other", lambda env, config: 3, Config)
    with raises("algorithm-returned-has-to-return", "other", "int"):
        make_graph("CartPole-v1")
    with raises("unknown-name", "hyperparameter", "'learning_rat'", "Did you mean learning_rate"):
        make_graph("CartPole-v1", learning_rat=1)


@pytest.mark.parametrize(
    ("build", "environment", "factory"),
    [
        (partial(rollmill.ppo, **SIZES), "CartPole-v1", tiny),
        (partial(rollmill.ippo, **SIZES), "TagGridWorld-Small-v0", tiny_of_agents),
    ],
)
def test_a_registered_network_is_recorded_and_made_again(build, environment, factory):
    rollmill.register_network("tiny", factory)
    graph = build(rollmill.make(environment), network=rollmill.NetworkConfig(name="tiny"))
    described = describe(graph)
    assert described["custom"] == [] and described["config"]["network"]["name"] == "tiny"
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(graph.start_learner, jax.random.key(0)))]
    assert any(3 in shape for shape in shapes)
    assert fingerprint(rebuild_graph(described)) == described["fingerprint"]


def test_a_network_by_name_takes_no_settings_of_another():
    rollmill.register_network("tiny", tiny)
    with raises("cannot-be-given-with-network", "hidden_sizes", "'tiny'"):
        rollmill.ppo(rollmill.make("CartPole-v1"), network=rollmill.NetworkConfig(name="tiny", hidden_sizes=(5,)))
    with raises("unknown-name", "network", "'tyny'", "Did you mean tiny"):
        rollmill.ppo(rollmill.make("CartPole-v1"), network=rollmill.NetworkConfig(name="tyny"))
    with raises("is-registered-already-take-another", "'tiny'"):
        rollmill.register_network("tiny", tiny)


def test_names_of_this_process_alone_stay_in_it():
    make_graph = rollmill.register_algorithm(
        "mine", lambda env, config: rollmill.ppo(env, config), rollmill.PPOConfig
    )
    rollmill.register("Mine-v0", lambda: rollmill.make("gymnasium:CartPole-v1"))
    rollmill.register_network("tiny", tiny)
    graph = make_graph("Mine-v0", network=rollmill.NetworkConfig(name="tiny"), **SIZES)
    described = describe(graph)
    custom = only_here(described, [])
    assert custom == ["algorithm mine", "environment Mine-v0", "network tiny"]
    options = rollmill.RunOptions()
    assert place_custom(choose_plan(graph, options), options, custom).place == "threads"
    with raises("this-algorithm-has-own-made", "algorithm mine and environment Mine-v0 and"):
        options = rollmill.RunOptions(place="processes")
        place_custom(choose_plan(graph, options), options, custom)
    assert only_here(described, ["a_module"]) == []
    assert choose_plan(graph, rollmill.RunOptions()).place == "processes"


BOATS = """
import rollmill


def boat():
    return rollmill.make("CartPole-v1")


rollmill.register("Boat-v0", boat)
"""


@pytest.fixture
def boats(tmp_path, monkeypatch):
    """A module in a folder of the user's, which registers an environment when it is imported."""
    (tmp_path / "boats.py").write_text(BOATS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "boats", raising=False)
    import boats

    yield boats
    sys.modules.pop("boats", None)


def test_the_module_that_registered_a_name_is_noted_by_itself(boats, monkeypatch):
    described = describe(rollmill.ppo("Boat-v0", **SIZES))
    assert with_own_modules([], described) == ("boats",)
    assert with_own_modules(["other"], described) == ("other", "boats")
    assert with_own_modules(["boats"], described) == ("boats",)
    assert only_here(described, []) == [] and note_of_unknown(described, []) is None
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(Path(boats.__file__).parent)])
    assert with_own_modules([], described) == (), "another process would not find it"


def test_the_module_of_a_registration_in_its_function_is_the_one_that_calls_it(boats):
    rollmill.register("Raft-v0", boats.boat)  # by this test, which no import repeats
    described = describe(rollmill.ppo("Raft-v0", **SIZES))
    assert with_own_modules([], described) == () and only_here(described, []) == ["environment Raft-v0"]
    note = note_of_unknown(described, [])
    assert "cannot create environment Raft-v0, because only the running program registers" in note
    assert "hint: call rollmill.register in a separate module" in note


def test_a_plan_that_becomes_one_of_threads_is_told():
    options, told = rollmill.RunOptions(distribution="single-learner-coarse"), []
    plan = choose_plan(rollmill.ppo("CartPole-v1", **SIZES), options)
    display = SimpleNamespace(note=told.append)
    assert place_parts(plan, options, [], display) == plan and not told
    assert place_parts(plan, options, ["environment Raft-v0"], display).place == "threads"
    assert told == [
        "note: training runs in threads of this process, because other processes cannot create environment Raft-v0"
    ]


def test_commands_find_modules_of_a_folder_of_the_users(boats, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = command("resume", "run", imports=["boats"])
    assert found == f"rollmill resume run --import {tmp_path}/boats.py"
    monkeypatch.chdir(tmp_path)
    assert command("resume", "run", imports=["boats"]) == "rollmill resume run --import boats.py"
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}mine")
    assert command("list", imports=["boats"]) == f"PYTHONPATH=.{os.pathsep}mine rollmill list --import boats"
    assert command("list", imports=["msgspec", "unknown"]) == "rollmill list --import msgspec --import unknown"


def test_a_module_that_python_does_not_find_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"cannot import 'rafts': .*with PYTHONPATH=DIRECTORY.*rafts\.py"):
        import_modules(["rafts"])
    (tmp_path / "rafts.py").write_text("import nowhere_at_all")
    with pytest.raises(UsageError, match=r"hint: rafts\.py is in the current directory.*--import rafts\.py"):
        import_modules(["rafts"])
    monkeypatch.syspath_prepend(tmp_path)
    with raises("plugin-failed", "No module named 'nowhere_at_all'", "rafts", "py:1: import nowhere"):
        import_modules(["rafts"])
