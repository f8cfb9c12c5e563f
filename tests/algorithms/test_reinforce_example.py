"""examples/reinforce.py: an algorithm of the user's own with a network of Rollmill, for several spaces."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import rollmill
from registries import restored
from rollmill.core.errors import UsageError
from rollmill.record.metrics import read_metrics
from rollmill.runs.algorithms import ALGORITHMS

TINY = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "network": rollmill.NetworkConfig(hidden_sizes=(4,))}


@pytest.fixture(scope="module")
def reinforce():
    spec = importlib.util.spec_from_file_location(
        "reinforce_example", Path(__file__).parents[2] / "examples/reinforce.py"
    )
    module = importlib.util.module_from_spec(spec)
    with restored(ALGORITHMS):
        spec.loader.exec_module(module)
        yield module.reinforce


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Probe-ActionMask-v0"])
def test_it_trains_on_discrete_continuous_and_masked_actions(reinforce, name, tmp_path):
    run = rollmill.train(reinforce(name, **TINY), run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    assert run.summary["status"] == "finished" and run.summary["env_steps"] == 64


def test_it_learns_which_action_is_rewarded(reinforce, tmp_path):
    sizes = {**TINY, "num_steps": 16, "total_timesteps": 8_192}
    algorithm = reinforce("Probe-ActionReward-v0", learning_rate=0.03, **sizes)
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    returns = rollmill.evaluate(run.directory, algorithm=algorithm, episodes=10).returns
    np.testing.assert_allclose(returns, 1.0)


def test_its_coefficients_follow_schedules(reinforce, tmp_path):
    quiet, sizes = {"quiet": True, "tensorboard": False}, {**TINY, "total_timesteps": 32 * 4}

    def trained(name, **config):
        run = rollmill.train(reinforce("CartPole-v1", **sizes, **config), run_dir=tmp_path / name, **quiet)
        return run.summary["weights_sha256"], read_metrics(run.directory / "metrics.jsonl")

    weights, lines = trained("falling", ent_coef="linear:0.2:0.1", vf_coef="constant:0.5")
    now = [line["schedules/ent_coef"] for line in lines]
    np.testing.assert_allclose(now, [0.2, 0.175, 0.15, 0.125], rtol=1e-6)
    constant, of_constant = trained("constant", ent_coef="constant:0.2")
    assert trained("number", ent_coef=0.2)[0] == constant != weights
    assert not any(name.startswith("schedules/") for name in of_constant[0])
    with pytest.raises(UsageError, match=r"ent_coef='linear:0\.1' must be a number or a schedule: "):
        reinforce("CartPole-v1", **sizes, ent_coef="linear:0.1")
