"""Trainings side by side in one program: each is the run that it would be alone."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import rollmill
from rollmill.core.errors import NonFiniteError
from rollmill.programs import program_store
from rollmill.runs.specification import build_graph
from rollmill.training.population import train_population
from rollmill.training.population_plans import plan_population
from rollmill.training.request import TrainingRequest, resolve, train_request
from rollmill.training.resuming import resume
from wordings import raises

SIZES = {
    "ppo": {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 256},
    "dqn": {"num_envs": 2, "num_steps": 4, "total_timesteps": 128, "buffer_size": 100}
    | {"learning_starts": 40, "batch_size": 16},
}


def requests_in(root: Path, algorithm: str, **options) -> list[TrainingRequest]:
    """Requests with other numbers, ends of schedules, parameters of the environment, and seeds."""
    settings = {**SIZES[algorithm], "network.hidden_sizes": (4,), "tensorboard": False, "quiet": True, **options}
    numbers = [
        {"learning_rate": 1e-2, "gamma": "linear:0.9:0.8", "seed": 1},
        {"learning_rate": 1e-3, "gamma": "linear:0.99:1", "seed": 5},
    ]
    parameters = [{"gravity": 9.8}, {"gravity": 3.7}]
    return [
        TrainingRequest(
            algorithm,
            "CartPole-v1",
            {**settings, **each, "run_dir": str(root / str(number))},
            environment_options=parameters[number],
        )
        for number, each in enumerate(numbers)
    ]


def digests(directory: Path) -> dict[int, str]:
    records = directory.glob("checkpoints/*/record.json")
    return {int(path.parent.name): json.loads(path.read_text())["sha256"] for path in records}


def lines_of(directory: Path) -> list[dict]:
    timed = ("seconds", "steps_per_second")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in kept]


def assert_same_run(mine: Path, alone: Path) -> None:
    assert digests(mine).keys() == digests(alone).keys() == {3, 6, 8}
    for line, expected in zip(lines_of(mine), lines_of(alone), strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
    assert rollmill_graph(mine) == rollmill_graph(alone)


def rollmill_graph(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["graph"]


@pytest.mark.slow
def test_a_training_of_a_population_goes_on_alone(tmp_path):
    runs = train_population(requests_in(tmp_path / "together", "ppo"))
    more = [resume(run.directory, changes={"total_timesteps": 512}, quiet=True) for run in runs]
    assert [run.summary["status"] for run in more] == ["finished", "finished"]
    _, request = requests_in(tmp_path / "alone", "ppo", total_timesteps=512)
    assert more[1].summary["total_env_steps"] == train_request(request).summary["total_env_steps"] == 512


@pytest.mark.slow
def test_trainings_with_a_replay_memory_share_a_program(tmp_path):
    runs = train_population(requests_in(tmp_path / "together", "dqn"))
    returns = [run.summary["final_return"] for run in runs]
    alone = [train_request(request).summary["final_return"] for request in requests_in(tmp_path / "alone", "dqn")]
    assert returns == pytest.approx(alone, rel=0.3)
    assert rollmill.load(runs[0].directory) is not None


def test_the_graph_of_a_population_is_built_once(tmp_path, monkeypatch):
    requests = requests_in(tmp_path, "ppo")
    expected = [resolve(request).graph() for request in requests]
    built = []
    build = lambda *words, **options: built.append(words) or build_graph(*words, **options)
    monkeypatch.setattr("rollmill.training.request.build_graph", build)
    planned = plan_population(requests)
    assert len(built) == 1
    for each, graph in zip(planned, expected, strict=True):
        assert each.graph.inputs == graph.inputs
        assert each.graph.settings == graph.settings
    assert planned[0].graph.inputs != planned[1].graph.inputs


def test_numbers_are_checked_against_each_other(tmp_path):
    first, _ = requests_in(tmp_path, "ppo", desired_kl=0.01, anneal_lr=False)
    too_high = first.changed({"learning_rate": 0.5, "run_dir": str(tmp_path / "too-high")})
    with raises("learning-rate-has-to-be"):
        plan_population([first, too_high])


@pytest.mark.parametrize(
    ("changes", "told"), [({"learning_rate": "constant:1e-2"}, "learning_rate"), ({"target_kl": 0.1}, "target_kl")]
)
def test_what_programs_contain_is_told(tmp_path, changes, told):
    first, other = requests_in(tmp_path, "ppo")
    with raises("trainings-differ-in-cannot-share", told):
        plan_population([first, replace(first, settings={**first.settings, **changes}), other])


def test_members_take_turns_with_the_program_that_each_has_alone(tmp_path, monkeypatch):
    """On a CPU, so that any number of members finds the stored program of a single training."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TF_ONLY_HERE", str(tmp_path))  # no other test has compiled the same program
    monkeypatch.setattr(program_store, "MIN_COMPILE_SECONDS", 0.0)
    stored = lambda: {file.name for file in (tmp_path / "cache" / "programs").iterdir()}
    requests = partial(requests_in, algorithm="ppo", checkpoint_iterations=3)
    alone = [train_request(request).directory for request in requests(tmp_path / "alone")]
    before = stored()
    runs = train_population(requests(tmp_path / "together"))
    assert [run.exit_code for run in runs] == [0, 0]
    assert stored() == before and len(before) == 2  # the start and the iteration
    together = [run.directory for run in runs]
    assert [*map(digests, together)] == [*map(digests, alone)] and digests(together[0]) != digests(together[1])
    for mine, expected in zip(together, alone, strict=True):
        assert_same_run(mine, expected)


def test_the_member_whose_numbers_are_not_finite_is_found(tmp_path):
    first, other = requests_in(tmp_path, "ppo")
    with pytest.raises(NonFiniteError, match="non-finite number in fragment"):
        train_population([first, other.changed({"learning_rate": 1e30})])
    (fault,) = tmp_path.rglob("fault.json")
    assert json.loads(fault.read_text())["seed_index"] == 1
