"""A run trains, evaluates and goes on with the graph that was asked for, or says that it cannot."""

import math
import subprocess
import sys
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from registries import restored
from rollmill.core.errors import CheckpointError, UsageError
from rollmill.dataflow import ElementwiseUpdate, fingerprint
from rollmill.envs import host_environment, registry
from rollmill.planning.choose import place_custom
from rollmill.runs import specification
from rollmill.runs.specification import describe, rebuild_graph
from rollmill.training.placing import choose_plan
from small_ppo import small_ppo
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}
SIZES = {"num_envs": 4, "num_steps": 4, "total_timesteps": 64, "num_minibatches": 2, "update_epochs": 2}
TINY = rollmill.NetworkConfig(hidden_sizes=(4,))


def small(env="CartPole-v1", **config):
    env = rollmill.make(env) if isinstance(env, str) else env
    return rollmill.ppo(env, **({"network": TINY} | SIZES | config))


def frozen(graph):
    """The graph, of which nothing is learned."""
    return graph._replace(update=ElementwiseUpdate(_unchanged))


def _unchanged(learner, gradients, *, share=1.0):
    return learner


@pytest.fixture(scope="module")
def plain():
    return describe(small())


def negated(function):
    return lambda *args, **named: jax.tree.map(lambda leaf: -leaf, function(*args, **named))


CHANGES = {
    "update": (frozen, "algorithm"),
    "gradients": (
        lambda g: g._replace(
            gradients=lambda learner, batch: (
                negated(lambda: g.gradients(learner, batch)[0])(),
                g.gradients(learner, batch)[1],
            )
        ),
        "algorithm",
    ),
    "condition": (lambda g: g._replace(condition=lambda batch, reduce: batch), "algorithm"),
    "keep_learning": (
        lambda g: g._replace(keep_learning=lambda metrics: metrics["losses/policy"] < 1),
        "algorithm",
    ),
    "loops": (lambda g: g._replace(loops=g.loops._replace(iterations=9)), "algorithm"),
    "start_learner": (
        lambda g: g._replace(start_learner=lambda key: g.start_learner(jax.random.key(5))),
        "algorithm",
    ),
    "greedy": (lambda g: g._replace(greedy=g.policy), "policy"),
    "environment": (
        lambda g: g._replace(environment=lambda key, state, action: g.environment(key, state, 1 - action)),
        "environment",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_was_changed_in_python_is_noticed(change, plain):
    changed, part = CHANGES[change]
    described = describe(changed(small()))
    assert described["fingerprint"] != plain["fingerprint"]
    assert described["custom"] == [part] and plain["custom"] == []


def test_hyperparameters_that_programs_contain_are_part_of_the_fingerprint(plain):
    for change in (
        {"clip_vloss": False},
        {"target_kl": 0.1},
        {"max_grad_norm": math.inf},
        {"total_timesteps": 80},
    ):
        described = describe(small(**change))
        assert described["custom"] == [] and described["fingerprint"] != plain["fingerprint"], change
    for change in ({"learning_rate": 1e-3}, {"gamma": 0.5}, {"clip_coef": 0.1}):  # data, which the learner holds
        described = describe(small(**change))
        assert described["custom"] == [] and described["fingerprint"] == plain["fingerprint"], change


def test_numbers_that_the_settings_do_not_name_are_noticed():
    graph = small()
    changed = graph._replace(hyperparameters={**graph.hyperparameters, "gamma": 0.5})
    assert describe(changed)["custom"] == ["hyperparameters"]


def test_constants_of_a_compiled_function_are_part_of_the_fingerprint():
    def with_wind(wind):
        env = rollmill.make("CartPole-v1")
        blow = jax.jit(lambda observation: observation + jnp.asarray(wind))

        def step(key, state, action, params):
            timestep = env.step(key, state, action, params)
            return timestep._replace(observation=blow(timestep.observation))

        return fingerprint(small(env._replace(step=step)))

    east, west = np.float32([0.5, 0, 0, 0]), np.float32([-0.5, 0, 0, 0])
    assert with_wind(east) == with_wind(east) != with_wind(west)


def test_the_fingerprint_is_that_of_another_process(plain):
    program = (
        "import rollmill; from rollmill.dataflow import fingerprint;"
        f"print(fingerprint(rollmill.ppo(rollmill.make('CartPole-v1'), **{SIZES!r}, "
        "network=rollmill.NetworkConfig(hidden_sizes=(4,)))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == plain["fingerprint"]


@pytest.mark.slow
def test_a_changed_graph_is_trained_as_it_is_and_never_replaced_by_its_name(tmp_path):
    graph = frozen(small())
    with raises("this-algorithm-has-own-made", "algorithm", "place=processes"):
        rollmill.train(graph, run_dir=tmp_path / "no", distribution="single-learner-coarse", place="processes")
    assert not (tmp_path / "no").exists()
    run = rollmill.train(graph, run_dir=tmp_path / "run", **QUIET)
    start = graph.start_learner(jax.random.split(jax.random.fold_in(jax.random.key(0), 0))[0])
    policy = rollmill.load(run.directory, algorithm=graph)
    # Statistics of observations and values change when a batch is prepared, not by an update.
    networks = policy.weights.network, start.weights.network
    for now, then in zip(*map(jax.tree.leaves, networks), strict=True):
        np.testing.assert_array_equal(now, then)
    for again in (rollmill.resume, rollmill.load, rollmill.evaluate):
        with raises("this-run-was-made-in", "algorithm"):
            again(run.directory)


@pytest.mark.slow
def test_a_run_does_not_go_on_in_processes_with_a_graph_that_was_changed(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    (run.directory / "summary.json").unlink()
    with pytest.raises(UsageError, match="its own algorithm, created in Python"):
        rollmill.resume(run.directory, algorithm=frozen(small()), place="processes", quiet=True)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("foo", r"checkpoint='foo' must be last, best or the iteration of a saved checkpoint: 0, 4"),
        (3, r"has no checkpoint 3\. Known: 0, 4"),
        ("best", "no best checkpoint"),
    ],
)
@pytest.mark.slow_beyond(1)
def test_a_checkpoint_that_is_not_there_is_not_replaced_by_the_last(checkpoint, message, tmp_path):
    endless = rollmill.make("MountainCar-v0", max_steps=10_000)
    algorithm = small(endless) if checkpoint == "best" else small_ppo(4)
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", **QUIET)
    with pytest.raises((UsageError, CheckpointError), match=message):
        rollmill.load(run.directory, checkpoint=checkpoint)


def test_options_of_an_environment_are_part_of_the_run():
    short = describe(small(rollmill.make("CartPole-v1", max_steps=3)))
    assert (short["environment"], short["environment_options"]) == ("CartPole-v1", {"max_steps": 3})
    assert short["custom"] == []
    assert fingerprint(rebuild_graph(short)) == short["fingerprint"]


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "envpool:CartPole-v1"])
def test_options_of_a_host_environment_are_part_of_the_fingerprint(name):
    pytest.importorskip(name.partition(":")[0])
    plain, short = (describe(small(rollmill.make(name, **options))) for options in ({}, {"max_episode_steps": 3}))
    assert short["environment_options"] == {"max_episode_steps": 3} and short["custom"] == []
    assert plain["fingerprint"] != short["fingerprint"]
    vector = rebuild_graph(short).host(range(1), seed=0)
    vector.reset()
    assert [bool(vector.step(np.array([n % 2])).truncated[0]) for n in range(3)] == [False, False, True]
    vector.close()


def test_options_that_json_cannot_hold_keep_a_training_in_its_process(tmp_path):
    graph = small(rollmill.make("gymnasium:MountainCar-v0", goal_velocity=np.float32(0.03)))
    custom = describe(graph)["custom"]
    assert custom == ["environment option goal_velocity"]
    options = rollmill.RunOptions()
    assert place_custom(choose_plan(graph, options), options, custom).place == "threads"
    with raises("this-algorithm-has-own-made", "environment option goal_velocity"):
        rollmill.train(graph, place="processes", run_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_host_environment_is_not_taken_for_the_one_whose_name_it_bears(tmp_path):
    env = host_environment("gymnasium:CartPole-v1", lambda: gymnasium.make("CartPole-v1", max_episode_steps=3))
    graph = small(env)
    assert describe(graph)["custom"] == ["environment"]
    run = rollmill.train(graph, run_dir=tmp_path / "run", **QUIET)
    with pytest.raises(CheckpointError, match="its own environment"):
        rollmill.evaluate(run.directory, episodes=2)
    assert rollmill.evaluate(run.directory, algorithm=graph, episodes=3).lengths.tolist() == [3, 3, 3]


@pytest.mark.slow
def test_an_own_host_environment_has_no_name_and_is_evaluated_all_the_same(tmp_path):
    graph = small(host_environment("mine", lambda: gymnasium.make("CartPole-v1", max_episode_steps=4)))
    run = rollmill.train(graph, run_dir=tmp_path / "run", **QUIET)
    assert rollmill.evaluate(run.directory, algorithm=graph, episodes=2).lengths.tolist() == [4, 4]


def test_a_registered_name_is_the_one_that_is_recorded():
    with restored(registry.ENVIRONMENTS):
        make = partial(rollmill.make, "gymnasium:CartPole-v1")
        rollmill.register("Short-v0", lambda steps=3: make(max_episode_steps=steps))
        described = describe(small(rollmill.make("Short-v0", steps=2)))
    assert (described["environment"], described["environment_options"]) == ("Short-v0", {"steps": 2})
    assert described["custom"] == []


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_options_of_its_environment(tmp_path):
    run = rollmill.train(small(rollmill.make("CartPole-v1", max_steps=3)), run_dir=tmp_path / "run", **QUIET)
    with pytest.raises(UsageError, match=r"different options of its environment: max_steps=4 \(the run has 3"):
        rollmill.resume(run.directory, algorithm=small(rollmill.make("CartPole-v1", max_steps=4)))
    with pytest.raises(UsageError, match="options max_steps need the name of another environment"):
        rollmill.evaluate(run.directory, env_options={"max_steps": 4})
    longer = rollmill.evaluate(run.directory, env="CartPole-v1", env_options={"max_steps": 2}, episodes=2)
    assert longer.lengths.tolist() == [2, 2] and rollmill.evaluate(run.directory, episodes=1).lengths.tolist() == [
        3
    ]


@pytest.mark.parametrize(
    ("algorithm", "environment"),
    [
        ("ppo", "CartPole-v1"),
        ("a3c", "Acrobot-v1"),
        ("impala", "CartPole-v1"),
        ("mappo", "TagGridWorld-Small-v0"),
        ("dqn", "CartPole-v1"),
        ("sac", "Pendulum-v1"),
        ("td3", "Pendulum-v1"),
        ("ppo", "gymnasium:CartPole-v1"),
    ],
)
def test_graphs_that_names_make_again_are_not_traced_for_that(monkeypatch, algorithm, environment):
    graph = getattr(rollmill, algorithm)(environment)
    traced = []
    spaces = lambda graph: repr((graph.observation_space, graph.action_space))  # which spaces remember
    monkeypatch.setattr(specification, "fingerprint", lambda graph: traced.append(spaces(graph)) or "digest")
    assert describe(graph)["custom"] == []
    assert len(traced) == 1
