"""`rollmill evaluate RUN --all-seeds`: the policy of each training seed, and their mean."""

import json

import numpy as np
import pytest

import rollmill
from rollmill.cli.evaluate import run as evaluate
from small_ppo import SIZES
from wordings import raises


def test_each_seed_is_played_and_the_mean_is_over_seeds(tmp_path, capsys):
    algorithm = rollmill.ppo("CartPole-v1", total_timesteps=64, **SIZES)
    trained = rollmill.train(
        algorithm, run_dir=tmp_path / "run", seed=4, num_seeds=2, quiet=True, tensorboard=False
    )
    words = [str(trained.directory), "--episodes", "5", "--all-seeds"]
    assert evaluate([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    each = [rollmill.evaluate(trained.directory, train_seed=seed, episodes=5).returns.mean() for seed in (4, 5)]
    assert [seed["mean_return"] for seed in result["seeds"]] == pytest.approx(each)
    assert [seed["train_seed"] for seed in result["seeds"]] == [4, 5]
    assert result["mean_return"] == pytest.approx(np.mean(each))
    assert result["std_over_seeds"] == pytest.approx(np.std(each)) and each[0] != each[1]
    assert evaluate(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "training seed 4: mean return" in printed[0] and "training seed 5" in printed[1]
    assert printed[2].startswith(f"2 training seeds: mean return {np.mean(each):.5g} (std over seeds ")


@pytest.mark.parametrize("other", [["--train-seed", "1"], ["--against", "random"], ["--watch"]])
def test_options_of_a_single_policy_are_refused(other):
    with raises("all-seeds-evaluates-policies-all", other[0]):
        evaluate(["run", "--all-seeds", *other])
