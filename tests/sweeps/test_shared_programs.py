"""Which trials of a sweep share a program."""

from dataclasses import dataclass, fields

import pytest

import rollmill
from registries import restored
from rollmill.core.errors import UsageError
from rollmill.programs.memory_needs import replay_size
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.search_space import listed_axis
from rollmill.sweeps.shared_programs import MAX_TRIALS, num_programs, trials_together
from rollmill.sweeps.spec import SweepSpec
from rollmill.training import preparing
from rollmill.training.population import train_population
from rollmill.training.request import TrainingRequest, resolve
from wordings import raises

SETTINGS = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "total_timesteps": 64,
    "network.hidden_sizes": (4,),
}


def sweep_over(root, settings=(), environment="CartPole-v1", algorithm="ppo", **values):
    """A sweep over all combinations of values."""
    axes = tuple(
        listed_axis(option if "." in option else option.replace("_", "-"), list(listed))
        for option, listed in values.items()
    )
    points = [()]
    for listed in values.values():
        points = [(*point, value) for point in points for value in listed]
    request = TrainingRequest(algorithm, environment, {**SETTINGS, **dict(settings)})
    return SweepDirectory.create(root, SweepSpec(request, axes, len(points), tuple(points)))


def names_together(sweep, places=1, alone=()):
    return [trial.name for trial in trials_together(sweep, sweep.trials(), alone, places=places)]


def test_trials_with_other_numbers_and_seeds_share_a_program(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", learning_rate=[1e-3, 2e-3], seed=[0, 1, 2])
    assert names_together(sweep) == ["0", "1", "2", "3", "4", "5"]
    assert names_together(sweep, places=2) == ["0", "1", "2"]
    assert names_together(sweep, alone={"1", "2"}) == ["0", "3", "4", "5"]
    assert names_together(sweep, alone={"0"}) == []  # the first one goes on alone, and then the others together


def test_what_a_program_contains_keeps_trials_apart(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", num_steps=[8, 16], anneal_lr=[True, False], gamma=[0.9, 0.99])
    assert names_together(sweep) == ["0", "1"]


@pytest.mark.parametrize("numbers", [{"target_kl": [0.1, 0.2]}, {"learning_rate": ["constant:1e-3", 1e-3]}])
def test_numbers_that_programs_contain_keep_trials_apart(tmp_path, numbers):
    sweep = sweep_over(tmp_path / "sweep", **numbers)
    assert names_together(sweep) == []
    assert num_programs(sweep, sweep.trials(), ()) == 2


def test_the_numbers_of_a_search_keep_trials_apart(tmp_path):
    axes = (listed_axis("gamma", [0.9, 1.0]), listed_axis("learning-rate", [1e-3, 1e-2]))
    request = TrainingRequest("alphazero", "TicTacToe-v0")
    points = [(gamma, rate) for gamma in (0.9, 1.0) for rate in (1e-3, 1e-2)]
    sweep = SweepDirectory.create(tmp_path / "sweep", SweepSpec(request, axes, 4, tuple(points)))
    assert names_together(sweep) == ["0", "1"]


def test_the_discount_factor_of_normalised_rewards_keeps_trials_apart(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", {"normalize_rewards": True}, gamma=[0.9, 0.99])
    assert names_together(sweep) == []
    settings = {**SETTINGS, "normalize_rewards": True, "quiet": True}
    requests = [TrainingRequest("ppo", "CartPole-v1", {**settings, "gamma": gamma}) for gamma in (0.9, 0.99)]
    with raises("trainings-differ-in-cannot-share", "gamma"):
        train_population(requests)


@dataclass(frozen=True)
class OwnConfig(rollmill.PPOConfig):
    own_weight: float = 1.0
    """A number that the functions of the algorithm read from the configuration."""


def own_ppo(env, config):
    """PPO with a hyperparameter of its own."""
    plain = {field.name: getattr(config, field.name) for field in fields(rollmill.PPOConfig)}
    return rollmill.ppo(env, rollmill.PPOConfig(**plain))


def test_trials_of_an_own_algorithm_share_a_program_if_its_learner_holds_what_differs(tmp_path):
    with restored(ALGORITHMS):
        rollmill.register_algorithm("own-ppo", own_ppo, OwnConfig)
        by_own = sweep_over(tmp_path / "own", algorithm="own-ppo", own_weight=[0.5, 2.0])
        assert names_together(by_own) == [] and num_programs(by_own, by_own.trials(), ()) == 2
        by_rate = sweep_over(tmp_path / "rate", algorithm="own-ppo", learning_rate=[1e-3, 2e-3], seed=[0, 1])
        assert names_together(by_rate) == ["0", "1", "2", "3"]


def test_an_own_algorithm_that_fails_is_left_to_its_trials(tmp_path):
    def fails(env, config):
        raise RuntimeError("cannot be built")

    with restored(ALGORITHMS):
        rollmill.register_algorithm("own-fails", fails, OwnConfig)
        sweep = sweep_over(tmp_path / "own", algorithm="own-fails", own_weight=[0.5, 2.0])
        assert names_together(sweep) == ["0", "1"]


def test_trials_with_other_ends_of_schedules_share_a_program(tmp_path):
    ends = ["linear:0.1:0", "linear:0.2:0.1", "cosine:0.1:0", 0.1]
    sweep = sweep_over(tmp_path / "sweep", ent_coef=ends)
    assert names_together(sweep) == ["0", "1"]


def test_trials_with_other_parameters_of_the_environment_share_a_program(tmp_path):
    axes = {"env-option.gravity": [3.7, 9.8], "env-option.max_steps": [100, 200]}
    sweep = sweep_over(tmp_path / "sweep", **axes)
    assert names_together(sweep) == ["0", "2"]


def test_invalid_options_of_the_environment_are_left_to_their_trials(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", **{"env-option.gravity": [9.8, "heavy", 3.7], "seed": [0, 1]})
    assert names_together(sweep) == ["0", "1", "4", "5"]
    assert num_programs(sweep, sweep.trials(), ()) == 2


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({"evaluate_every": 1}, "CartPole-v1"),
        ({"stop_at_return": 100.0}, "CartPole-v1"),
        ({"num_seeds": 2}, "CartPole-v1"),
        ({}, "gymnasium:CartPole-v1"),
    ],
)
def test_trials_that_need_a_program_of_their_own(settings, environment, tmp_path):
    sweep = sweep_over(tmp_path / "sweep", settings, environment, seed=[0, 1])
    assert names_together(sweep) == []


def test_a_program_holds_a_limited_number_of_trials(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", seed=range(MAX_TRIALS + 3))
    assert len(names_together(sweep)) == MAX_TRIALS


def test_programs_are_counted(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", num_steps=[8, 16], seed=range(MAX_TRIALS + 3))
    trials = sweep.trials()
    assert num_programs(sweep, trials, ()) == 4
    assert num_programs(sweep, trials[: MAX_TRIALS + 1], {"00", "01"}) == 3
    sweep.run(trials[0]).root.mkdir()  # it has begun, and goes on in a program of its own
    assert num_programs(sweep, trials[:3], ()) == 2
    apart = sweep_over(tmp_path / "apart", {"evaluate_every": 1}, seed=[0, 1])
    assert num_programs(apart, apart.trials(), ()) == 2


def test_trials_that_have_begun_go_on_alone(tmp_path):
    sweep = sweep_over(tmp_path / "sweep", seed=[0, 1, 2])
    sweep.run(sweep.trials()[1]).root.mkdir()
    assert names_together(sweep) == ["0", "2"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_steps": 16}, ("trainings-differ-in-cannot-share", "loops, num_steps")),
        ({"anneal_lr": False}, ("trainings-differ-in-cannot-share", "anneal_lr")),
        ({"evaluate_every": 1}, ("training-with-has-program-own", "evaluate_every")),
        ({"num_seeds": 2}, ("population-consists-trainings-one-seed",)),
    ],
)
def test_trainings_that_cannot_share_a_program_are_refused(other, message, tmp_path):
    first = TrainingRequest("ppo", "CartPole-v1", {**SETTINGS, "run_dir": str(tmp_path / "0"), "quiet": True})
    second = first.changed({"run_dir": str(tmp_path / "1"), **other})
    with raises(*message):
        train_population([first, second])
    assert not list(tmp_path.iterdir())


def test_the_replay_memories_of_all_trainings_have_to_fit(tmp_path, monkeypatch):
    sizes = []

    def refuse(size, **_):
        sizes.append(size)
        raise UsageError("too large")

    monkeypatch.setattr(preparing, "check_replay_size", refuse)
    stored = {"num_envs": 2, "num_steps": 4, "total_timesteps": 128, "buffer_size": 100, "learning_starts": 40}
    settings = {**stored, "batch_size": 16, "network.hidden_sizes": (4,), "quiet": True}
    requests = [
        TrainingRequest("dqn", "CartPole-v1", {**settings, "seed": seed, "run_dir": str(tmp_path / str(seed))})
        for seed in range(3)
    ]
    with pytest.raises(UsageError, match="too large"):
        train_population(requests)
    graph = resolve(requests[0]).graph()
    assert sizes == [replay_size(graph, num_seeds=3)] and sizes[0] != replay_size(graph)
    assert not list(tmp_path.iterdir())
