"""Options of a training from a file."""

import json

import pytest

from rollmill.cli.config_file import with_config_file
from rollmill.cli.parsing import flags_and_lists
from rollmill.cli.train import _arguments, types_of_options
from rollmill.core.errors import UsageError

FILE = """
algorithm = "ppo"
environment = "CartPole-v1"
total-timesteps = 1024
num_envs = 8
num-steps = 32
learning-rate = "linear:1e-3:1e-4"
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


def expanded(*words):
    return with_config_file([*map(str, words)], types_of_options)


def test_a_file_stands_for_its_options_and_those_of_the_command_come_first(file):
    words = expanded("--config", file, "--seed", "9", "--network.hidden-sizes", "4")
    assert words[:2] == ["ppo", "CartPole-v1"]
    given = " ".join(words)
    assert "--num-envs 8 --num-steps 32 --learning-rate linear:1e-3:1e-4 --no-anneal-lr" in given
    assert "--transform reward-scale:0.5 --transform time" in given and "--env-option max_steps=30" in given
    assert given.count("--seed") == 1 and "--seed 9" in given
    assert given.count("hidden-sizes") == 1 and given.endswith("--network.hidden-sizes 4")
    assert "--network.layer-norm" in given and "--no-tensorboard" in given


@pytest.mark.parametrize("named", [["dqn"], ["dqn", "Acrobot-v1"]], ids=len)
def test_names_of_the_command_come_before_those_of_the_file(file, named):
    words = expanded(*named, f"--config={file}")
    assert words[:2] == [*named, "CartPole-v1"][:2] and words[2].startswith("--")


def test_without_the_option_nothing_changes():
    assert expanded("ppo", "CartPole-v1", "--seed", "1") == ["ppo", "CartPole-v1", "--seed", "1"]


@pytest.mark.slow
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
    assert (
        configs[0]["graph"]["config"]["learning_rate"] == "linear:1e-3:1e-4" and configs[0]["options"]["seed"] == 7
    )
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("first", "again")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.toml", None, "missing.toml cannot be read"),
        ("bad.toml", "seed = = 3", "bad.toml is not TOML: .*line 1"),
        ("other.json", "{}", "other.json is not the config.json of a run"),
        ("broken.json", "{", "broken.json cannot be read|broken.json"),
        (
            "algorithm.toml",
            'algorithm = "pp"\nenvironment = "CartPole-v1"',
            "algorithm.toml: unknown algorithm",
        ),
        (
            "environment.toml",
            'algorithm = "ppo"\nenvironment = "CartPole-v3"',
            "environment.toml: unknown environment 'CartPole-v3'. Did you mean CartPole-v1",
        ),
        ("nameless.toml", "seed = 3", "names the algorithm. hint: algorithm = "),
        ("dates.toml", 'algorithm = "ppo"\nenvironment = "CartPole-v1"\nseed = 2026-01-01', "seed = 2026-01-01"),
    ],
    ids=[
        "missing",
        "no TOML",
        "another JSON",
        "broken JSON",
        "wrong algorithm",
        "wrong environment",
        "no algorithm",
        "a date",
    ],
)
def test_bad_files_are_explained(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        expanded("--config", tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sead = 7", r"wrong.toml: unknown option sead. Did you mean seed\?"),
        ("lr = 1e-3", r"wrong.toml: unknown option lr. Did you mean learning-rate\?"),
        ("hidden-sizes = [4]", r"wrong.toml: unknown option hidden-sizes. Did you mean network.hidden-sizes\?"),
        ("network.hiden_sizes = [4]", r"unknown option network.hiden_sizes. Did you mean network.hidden-sizes"),
        (
            "environment-options.max_steps = 3",
            r"environment-options. Did you mean env-option \(a table\)",
        ),
        ('imports = ["mine"]', r"unknown option imports. Did you mean import\?"),
        ("nothing-like-it = 1", "unknown option nothing-like-it. `rollmill train ALGORITHM --help` lists"),
        (
            'learning-rate = "1e-3"',
            "='1e-3' must be a number.* leave out the quotes: learning-rate = 1e-3",
        ),
        ('network.layer-norm = "true"', "must be True or False, .* leave out the quotes: layer-norm = true"),
        ('num_envs = "many"', r"wrong.toml: num_envs='many' must be a whole number, not a str\.$"),
        ("num_envs = 1.5", "wrong.toml: num_envs=1.5 must be a whole number"),
        ("num_envs = 0", "wrong.toml: num_envs=0 must be at least 1"),
        ('fusion = "ful"', r"wrong.toml: unknown fusion 'ful'. Did you mean full\?"),
        ("seed = [1, 2]", r"wrong.toml: seed=\[1, 2\] must be a whole number"),
    ],
    ids=lambda text: text.partition(" ")[0],
)
def test_a_wrong_key_or_value_is_told_with_file_and_key(tmp_path, line, message):
    file = tmp_path / "wrong.toml"
    file.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=message):
        expanded("ppo", "CartPole-v1", "--config", file)


def test_numbers_of_a_file_are_read_as_in_python(tmp_path):
    file = tmp_path / "numbers.toml"
    file.write_text("total-timesteps = 1e6\nlearning-rate = 1\ncheckpoint-seconds = inf\n")
    words = expanded("ppo", "CartPole-v1", "--config", file)
    assert words[2:] == ["--total-timesteps", "1000000", "--learning-rate", "1.0", "--checkpoint-seconds", "inf"]


@pytest.mark.parametrize("words", [["--config", "FILE"], []], ids=["with a file", "without"])
def test_a_third_name_is_refused(file, words):
    words = [file if word == "FILE" else word for word in words]
    with pytest.raises(UsageError, match="'extra' is one name too many: .*here 'ppo', .*here 'CartPole-v1'"):
        expanded("ppo", "CartPole-v1", "extra", *words)


@pytest.mark.parametrize("algorithm", ["ppo", "alphazero", "sac", "mappo"])
def test_types_are_known_for_all_options_of_a_training(algorithm):
    """Or a file could not have them."""
    flags, lists = flags_and_lists(_arguments(algorithm, []), prog="rollmill train")
    assert (flags | lists) - {"help", "h", "-h"} <= types_of_options(algorithm, []).keys()


def test_an_option_that_does_not_exist_is_refused_by_the_command(rollmill, file):
    file.write_text(FILE.replace("seed = 7", "sead = 7"))
    done = rollmill("train", "--config", file)
    assert done.returncode == 2 and "run.toml: unknown option sead" in done.stderr
    assert "Traceback" not in done.stderr
