"""Where a training may run, as its options say, before anything is started."""

import pytest

import rollmill
from rollmill.planning.plan import write_plan
from rollmill.runs.options import RunOptions
from rollmill.training.placing import choose_plan, refuse_unread
from rollmill.training.resuming import reset_placement
from wordings import raises

SIZES = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 64}


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("gymnasium:CartPole-v1", {"place": "mesh"}, ("place-mesh-steps-environments-in",)),
        (
            "CartPole-v1",
            {"distribution": "multi-learner", "fusion": "rollout"},
            ("fusion-rollout-makes-kernel-environment", "use distr"),
        ),
        ("gymnasium:CartPole-v1", {"fusion": "full"}, ("fusion-these-environments-are-stepped", "full")),
    ],
)
def test_what_does_not_go_together_is_refused(environment, options, message):
    graph = rollmill.ppo(rollmill.make(environment), **SIZES)
    with raises(*message):
        choose_plan(graph, RunOptions(**options))


@pytest.mark.parametrize(
    ("environment", "options", "device"),
    [
        ("CartPole-v1", {}, "any"),
        ("CartPole-v1", {"actors_on": "gpu"}, "any"),
        ("CartPole-v1", {"actors_on": "cpu"}, "cpu"),
        ("CartPole-v1", {"place": "ray"}, "cpu"),
        ("CartPole-v1", {"cluster": "auto"}, "cpu"),
        ("CartPole-v1", {"cluster": "auto", "actors_on": "gpu"}, "any"),
        ("gymnasium:CartPole-v1", {}, "cpu"),
    ],
)
def test_actors_of_compiled_environments_on_this_host_may_use_gpus(environment, options, device):
    graph = rollmill.ppo(rollmill.make(environment), **SIZES)
    plan = choose_plan(graph, RunOptions(distribution="single-learner-coarse", **options))
    assert [group.device for group in plan.partition.groups] == [device, "any"]


def test_actors_on_gpus_need_a_gpu():
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **SIZES)
    options = RunOptions(distribution="single-learner-coarse", actors_on="gpu")
    with raises("actors-on-gpu-needs-gpu"):
        refuse_unread(choose_plan(graph, options), options)


def test_ray_places_the_processes_of_a_mesh():
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **SIZES)
    options = RunOptions(cluster="auto", place="mesh", learners=2, host="127.0.0.1")
    plan = choose_plan(graph, options)
    assert plan.place == "mesh" and [group.replicas for group in plan.partition.groups] == [2]
    with raises("gpu-sharing-has-no-effect-with", "mps", "cluster=auto"):
        refuse_unread(plan, RunOptions(cluster="auto", place="mesh", gpu_sharing="mps"))
    with raises("cluster-has-ray-place-workers", "processes"):
        RunOptions(cluster="auto", place="processes")
    with raises("cluster-is-none-write-ray", "nowhere"):
        choose_plan(graph, RunOptions(cluster="nowhere", place="mesh", learners=2))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (
            "CartPole-v1",
            {"actors": 4},
            ("has-no-effect-distribution-policy", "actors", "4", "gpu-only", "learners"),
        ),
        (
            "gymnasium:CartPole-v1",
            {"workers": 16},
            ("has-no-effect-distribution-policy", "workers", "16", "gpu-only"),
        ),
        (
            "CartPole-v1",
            {"distribution": "single-learner-coarse", "learners": 1},
            ("has-no-effect-distribution-policy", "learners", "1"),
        ),
        (
            "CartPole-v1",
            {"distribution": "multi-learner", "actors": 2},
            ("has-no-effect-distribution-policy", "actors", "2"),
        ),
        (
            "CartPole-v1",
            {"distribution": "central", "workers": 2},
            ("has-no-effect-distribution-policy", "workers", "2"),
        ),
        (
            "CartPole-v1",
            {"distribution": "central", "actors_on": "cpu"},
            ("has-no-effect-distribution-policy", "actors_on", "cpu", "central"),
        ),
        ("CartPole-v1", {"host": "10.0.0.1"}, ("host-has-no-effect-with", "10.0.0.1", "program")),
        ("CartPole-v1", {"host": "h", "place": "processes"}, ("host-has-no-effect-with", "h", "processes")),
        ("CartPole-v1", {"checksums": True}, ("checksums-has-no-effect-with", "program")),
        ("CartPole-v1", {"hang_seconds": 5.0}, ("has-no-effect-with-place", "hang_seconds", "5.0")),
        ("CartPole-v1", {"gpu_sharing": "mps"}, ("gpu-sharing-has-no-effect-with", "mps", "program")),
        (
            "CartPole-v1",
            {"memory_fraction": 0.5},
            ("has-no-effect-jax-uses", "0.5"),
        ),
        (
            "CartPole-v1",
            {"memory_fraction": 0.5, "place": "threads"},
            ("memory-fraction-has-no-effect-with", "threads"),
        ),
        ("CartPole-v1", {"max_failures": 9}, ("has-no-effect-with-place", "max_failures", "9")),
        ("CartPole-v1", {"fusion": "off", "numerics": "float32"}, ("numerics-has-no-effect-with", "float32")),
    ],
)
def test_an_option_without_effect_is_refused(environment, options, message):
    graph = rollmill.ppo(rollmill.make(environment), **SIZES)
    with raises(*message):
        refuse_unread(choose_plan(graph, RunOptions(**options)), RunOptions(**options))


@pytest.mark.parametrize("options", [{"actors": 4}, {"place": "threads"}, {"distribution": "central"}])
def test_beside_a_plan_nothing_else_says_where_a_group_runs(options, tmp_path):
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), **SIZES)
    write_plan(choose_plan(graph, RunOptions()), tmp_path / "plan.json")
    assert choose_plan(graph, RunOptions(plan=tmp_path / "plan.json")).place == "program"
    with raises("has-no-effect-beside-plan"):
        choose_plan(graph, RunOptions(plan=tmp_path / "plan.json", **options))


def test_of_another_policy_nothing_is_kept_that_was_said_of_the_old_one():
    counts = {"workers", "actors", "learners", "asynchronous", "actors_on"}
    of_old = {*counts, "place", "cluster", "host", "plan", "distribution"}
    new = reset_placement({"distribution": "central"})
    assert new.keys() == {*of_old, "reduction"} and new["reduction"] == "auto"
    assert [name for name in of_old if new[name]] == ["distribution"]
    asked = {"distribution": "central", "asynchronous": True, "place": "threads", "actors": 3}
    assert asked.items() <= reset_placement(asked).items()
    assert reset_placement({"cluster": "ray"}) == {
        **{"cluster": "ray", "place": None, "host": None},
        "reduction": "auto",
    }
    assert reset_placement({"actors": 3}) == {"actors": 3, "reduction": "auto"}


@pytest.mark.parametrize(
    ("algorithm", "settings", "hint"),
    [
        ("ppo", {"normalize_observations": True}, "turn off normalize_observations, or leave asynchronous out"),
        ("dqn", {}, "or choose another distribution policy, such as single-learner-coarse"),
    ],
)
def test_asynchronous_gradients_refuse_what_would_drift_apart(algorithm, settings, hint):
    graph = getattr(rollmill, algorithm)("CartPole-v1", **settings)
    with raises("asynchronous-sends-gradients-to-update", algorithm, hint):
        choose_plan(graph, RunOptions(distribution="central", asynchronous=True))


def test_a_replay_memory_of_asynchronous_actors_is_refused():
    graph = rollmill.dqn("CartPole-v1")

    def prepare(learner, trajectory, *, reduce, replicas):
        """Counts nothing, so that only the memory stands against it."""
        return learner, graph.prepare(learner, trajectory, reduce=reduce, replicas=replicas)[1]

    with raises("asynchronous-would-keep-part-replay", "dqn"):
        choose_plan(graph._replace(prepare=prepare), RunOptions(distribution="central", asynchronous=True))


def test_a_pool_of_opponents_of_asynchronous_actors_is_refused():
    options = RunOptions(distribution="single-learner-coarse", asynchronous=True)
    with raises("asynchronous-would-learn-from-rollouts", "single-learner-coarse"):
        choose_plan(rollmill.ippo("TagGridWorld-Small-v0", pool_size=2), options)
    choose_plan(rollmill.ippo("TagGridWorld-Small-v0"), options)
