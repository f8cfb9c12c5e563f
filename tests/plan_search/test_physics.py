"""The choice between this package's physics and MuJoCo Warp by short trainings."""

import json
import os
import subprocess
import sys

import pytest

import rollmill
from rollmill.plan_search import physics
from rollmill.plan_search.search.searching import CannotRun
from rollmill.training.request import TrainingRequest
from wordings import raises

REQUEST = TrainingRequest("ppo", "robots:Ant", {"num_envs": 8}, {"physics": "auto", "max_steps": 50})


@pytest.fixture
def on_gpu(monkeypatch):
    """A machine with a GPU and MuJoCo Warp."""
    monkeypatch.setattr(physics, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(physics, "find_spec", lambda name: name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def choose(rates, request=REQUEST):
    """The chosen physics, the bounds of the trainings, and what was said."""
    bounds, said = [], []

    def measure(tried, bound):
        assert tried.environment_options["max_steps"] == 50 and tried.settings == request.settings
        bounds.append(bound)
        rate = rates[tried.environment_options["physics"]]
        if isinstance(rate, Exception):
            raise rate
        return rate

    chosen = physics.with_fastest_physics(request, measure=measure, say=said.append)
    assert chosen.environment_options.keys() == request.environment_options.keys()
    return chosen.environment_options["physics"], bounds, said


@pytest.mark.parametrize(
    ("own", "warp", "chosen"), [(3e6, 1e6, "jax"), (1e6, 3e6, "warp"), (1e6, 1.04e6, "jax"), (1e6, 1.06e6, "warp")]
)
def test_the_faster_physics_trains_unless_it_is_hardly_faster(on_gpu, own, warp, chosen):
    found, bounds, said = choose({"jax": own, "warp": warp})
    assert found == chosen and bounds == [None, own]
    assert f"{own:,.0f} steps/s" in said[0] and f"{warp:,.0f} steps/s" in said[1]
    assert f"physics={chosen}" in said[2]


def test_physics_that_cannot_run_are_not_chosen(on_gpu):
    full = CannotRun("a buffer is too small")
    found, _, said = choose({"jax": 1e6, "warp": full})
    assert found == "jax" and "physics=warp: a buffer is too small" in said
    assert choose({"jax": full, "warp": 1.0})[0] == "warp"
    with raises("no-physics-could-train", "robots:Ant", "a buffer is too small"):
        choose({"jax": full, "warp": full})


def test_without_a_gpu_or_mujoco_warp_there_is_no_choice(on_gpu, monkeypatch):
    monkeypatch.setattr(physics, "find_spec", lambda name: None)
    found, bounds, said = choose({})
    assert (found, bounds) == ("jax", []) and "pip install" in said[0]
    monkeypatch.setattr(physics, "visible_gpus", lambda: [])
    assert "none that JAX may use" in choose({})[2][0]


def test_a_restarted_job_chooses_nothing(on_gpu):
    with raises("physics-auto-cannot-be-combined"):
        choose({}, REQUEST.changed({"resume_if_exists": True}))


def test_only_rollmill_train_knows_auto():
    with raises("robots-physics-auto-is-for", "robots:Cartpole"):
        rollmill.make("robots:Cartpole", physics="auto")
    assert not physics.leaves_physics_open(TrainingRequest("ppo", "mine:Ant", {}, {"physics": "auto"}))


TRAIN = [sys.executable, "-m", "rollmill", "train", "ppo", "robots:Cartpole", "--env-option", "physics=auto"]
SIZES = ["--num-envs", "4", "--num-steps", "8", "--num-minibatches", "1", "--total-timesteps", "64"]
ON_CPU = os.environ | {"JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_a_run_records_the_physics_that_were_chosen(tmp_path):
    run = tmp_path / "run"
    command = [*TRAIN, *SIZES, "--run-dir", str(run), "--no-tensorboard"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ON_CPU)
    assert "physics=jax, because" in done.stderr
    assert '"physics": "jax"' in json.dumps(json.loads((run / "config.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--search-plan", "--plan=p.json"])
def test_a_plan_and_a_choice_of_physics_exclude_each_other(option):
    done = subprocess.run([*TRAIN, option], check=False, capture_output=True, text=True, env=ON_CPU)
    assert done.returncode == 2 and "physics=auto cannot be combined with" in done.stderr


@pytest.mark.slow
def test_a_short_training_measures_steps_per_second():
    request = TrainingRequest(
        "ppo", "robots:Cartpole", {"num_envs": 16, "total_timesteps": 10**7, "fusion": "off"}, {"physics": "jax"}
    )
    assert physics.train_briefly(request, None, stop=lambda: None) > 10
    with pytest.raises(CannotRun, match="num_minibatches"):
        physics.train_briefly(request.changed({"num_minibatches": 7}), None, stop=lambda: None)
