"""Options of a training from a file."""

import json

import pytest

from rollmill.cli.config_file import with_config_file
from rollmill.core.errors import UsageError

FILE = """
algorithm = "ppo"
environment = "CartPole-v1"
total-timesteps = 1024
num_envs = 8
num-steps = 32
learning-rate = 1e-3
anneal-lr = false
seed = 7
tensorboard = false
transform = ["reward-scale:0.5", "time"]

[network]
hidden-sizes = [16, 8]
layer-norm = true

[env-option]
max_steps = 30
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_a_file_stands_for_its_options_and_those_of_the_command_come_first(file):
    words = with_config_file(["--config", str(file), "--seed", "9", "--network.hidden-sizes", "4"])
    assert words[:2] == ["ppo", "CartPole-v1"]
    given = " ".join(words)
    assert "--num-envs 8 --num-steps 32 --learning-rate 0.001 --no-anneal-lr" in given
    assert "--transform reward-scale:0.5 --transform time" in given and "--env-option max_steps=30" in given
    assert given.count("--seed") == 1 and "--seed 9" in given
    assert given.count("hidden-sizes") == 1 and given.endswith("--network.hidden-sizes 4")
    assert "--network.layer-norm" in given and "--no-tensorboard" in given


@pytest.mark.parametrize("named", [["dqn"], ["dqn", "Acrobot-v1"]], ids=len)
def test_names_of_the_command_come_before_those_of_the_file(file, named):
    words = with_config_file([*named, f"--config={file}"])
    assert words[:2] == [*named, "CartPole-v1"][:2] and words[2].startswith("--")


def test_without_the_option_nothing_changes():
    assert with_config_file(["ppo", "CartPole-v1", "--seed", "1"]) == ["ppo", "CartPole-v1", "--seed", "1"]


def test_a_training_from_a_file_and_one_from_its_configuration_are_equal(rollmill, file, tmp_path):
    file.write_text(FILE.replace('transform = ["reward-scale:0.5", "time"]', 'transform = ["reward-scale:0.5"]'))
    file.write_text(file.read_text().replace("\n[env-option]\nmax_steps = 30\n", ""))
    first = rollmill("train", "--config", file, "--run-dir", "first", "--quiet")
    assert first.returncode == 0, first.stderr
    again = rollmill("train", "--config", "first/config.json", "--run-dir", "again", "--quiet")
    assert again.returncode == 0, again.stderr
    configs = [json.loads((tmp_path / run / "config.json").read_text()) for run in ("first", "again")]
    assert configs[0]["graph"] == configs[1]["graph"] and configs[0]["options"] == configs[1]["options"]
    assert configs[0]["graph"]["config"]["network"]["hidden_sizes"] == [16, 8]
    assert configs[0]["graph"]["config"]["learning_rate"] == 1e-3 and configs[0]["options"]["seed"] == 7
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("first", "again")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.toml", None, "missing.toml cannot be read"),
        ("bad.toml", "seed = = 3", "bad.toml is not TOML: .*line 1"),
        ("other.json", "{}", "other.json is not the config.json of a run"),
        ("broken.json", "{", "broken.json cannot be read|broken.json"),
        ("nameless.toml", "seed = 3", "names the algorithm. hint: algorithm = "),
        ("dates.toml", 'algorithm = "ppo"\nenvironment = "CartPole-v1"\nseed = 2026-01-01', "seed = 2026-01-01"),
    ],
    ids=["missing", "no TOML", "another JSON", "broken JSON", "no algorithm", "a date"],
)
def test_bad_files_are_explained(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        with_config_file(["--config", str(tmp_path / name)])


def test_an_option_that_does_not_exist_is_refused_as_on_the_command_line(rollmill, file):
    file.write_text(FILE.replace("seed = 7", "sead = 7"))
    done = rollmill("train", "--config", file)
    assert done.returncode == 2 and "--sead" in done.stdout + done.stderr and "Traceback" not in done.stderr
