"""`--env-option`: what was asked for reaches workers, evaluation and whoever goes on."""

import json

import pytest

from rollmill.cli.shared_options import chosen_environment_options, parse_env_options
from wordings import raises


def test_values_are_json_or_text():
    texts = ["a=1", "b=1.5", "c=false", "d=null", "e=[1, 2]", "f=hopper.xml", "g=", 'h="True"', "i=x=y"]
    expected = {"a": 1, "b": 1.5, "c": False, "d": None, "e": [1, 2], "f": "hopper.xml", "g": "", "h": "True"}
    assert parse_env_options(texts) == {**expected, "i": "x=y"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["length"], ("has-to-be-key-value", "'length'")),
        (["=3"], ("has-to-be-key-value", "'=3'")),
        (["a=1", "a=2"], ("is-given-twice-as-and", "a", "1", "'2'")),
        (["healthy=False"], ("is-not-json-in-double", "False", "write false, or", "False")),
        (["gravity=nan"], ("is-not-json-in-double", "nan", "nan")),
        (["gravity=Infinity"], ("option-cannot-be-read", "gravity=Infinity")),
    ],
)
def test_a_value_that_may_mean_something_else_is_refused(texts, message):
    with raises(*message):
        parse_env_options(texts)


@pytest.mark.slow
def test_options_reach_workers_evaluation_and_a_resumed_run(rollmill, tmp_path):
    shorter = ["--env-option", "max_episode_steps=2"]
    option = ["--env-option", "max_episode_steps=3"]
    sizes = ["--num-envs", "4", "--num-steps", "8", "--network.hidden-sizes", "4"]
    total = ["--total-timesteps", "160", "--run-dir", "run", "--quiet"]
    done = rollmill("train", "ppo", "gymnasium:CartPole-v1", *option, *sizes, *total)
    assert done.returncode == 0, done.stderr
    graph = json.loads((tmp_path / "run/config.json").read_text())["graph"]
    assert graph["environment_options"] == {"max_episode_steps": 3} and graph["custom"] == []
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["episode/length"] == 3
    done = rollmill("evaluate", "run", "--episodes", "4", "--json")
    assert json.loads(done.stdout)["mean_length"] == 3, done.stderr
    done = rollmill("evaluate", "run", "--env", "gymnasium:CartPole-v1", *shorter, "--json")
    assert json.loads(done.stdout)["mean_length"] == 2, done.stderr
    done = rollmill("train", "ppo", "gymnasium:CartPole-v1", "--env-option", "max_episode_step=3", *sizes)
    assert done.returncode == 2 and "Did you mean max_episode_steps? Its options" in done.stderr, done.stderr


def test_transforms_are_options_of_the_environment_in_the_order_given():
    chosen = chosen_environment_options(["a=1"], ["frame-stack:4", "flatten"])
    assert chosen == {"a": 1, "transforms": ["frame-stack:4", "flatten"]}
    assert chosen_environment_options(["a=1"], []) == {"a": 1}
    with raises("transform-and-env-option-give"):
        chosen_environment_options(['transforms=["flatten"]'], ["flatten"])
    with raises("unknown-name", "transform", "'flaten'", "Did you mean flatten"):
        chosen_environment_options([], ["flaten"])


@pytest.mark.slow
def test_transforms_reach_workers_evaluation_and_a_resumed_run(rollmill, tmp_path):
    transforms = ["--transform", "frame-stack:2", "--transform", "reward-scale:0.5"]
    sizes = ["--num-envs", "4", "--num-steps", "8", "--network.hidden-sizes", "4"]
    total = ["--total-timesteps", "96", "--run-dir", "run", "--quiet", "--env-option", "max_episode_steps=4"]
    where = ["--distribution", "single-learner-coarse", "--actors", "2"]
    done = rollmill("train", "ppo", "gymnasium:CartPole-v1", *transforms, *sizes, *total, *where)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    options = config["graph"]["environment_options"]
    assert options == {"max_episode_steps": 4, "transforms": ["frame-stack:2", "reward-scale:0.5"]}
    assert config["plan"]["place"] == "processes"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (rows[-1]["episode/length"], rows[-1]["episode/return"]) == (4, 2)
    done = rollmill("resume", "run", "--set", "total_timesteps=128", "--quiet")
    assert done.returncode == 0, done.stderr
    done = rollmill("evaluate", "run", "--episodes", "2", "--json")
    assert json.loads(done.stdout)["mean_return"] == 2, done.stderr
    unscaled = ["--env", "CartPole-v1", "--transform", "frame-stack:2", "--env-option", "max_steps=3"]
    done = rollmill("evaluate", "run", *unscaled, "--episodes", "2", "--json")
    assert json.loads(done.stdout)["mean_return"] == 3, done.stderr
    done = rollmill("evaluate", "run", "--transform", "flatten")
    assert done.returncode == 2 and "the options transforms need the name of another environment" in done.stderr
    done = rollmill("train", "ppo", "CartPole-v1", "--transform", "grey")
    assert done.returncode == 2 and "the transform grey needs observations" in done.stderr
