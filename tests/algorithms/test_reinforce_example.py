"""examples/reinforce.py: an algorithm of the user's own with a network of Rollmill, for several spaces."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import rollmill
from registries import restored
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
