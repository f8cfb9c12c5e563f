"""Options of a training from a file."""

import json
from dataclasses import dataclass

import pytest

from rollmill.cli.requests import parse_training
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.algorithms import ALGORITHMS, Algorithm
from rollmill.runs.trust import remember
from rollmill.training.request import TrainingRequest, read_request, resolve
from wordings import raises

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


def parsed(*words):
    return parse_training([*map(str, words)]).request


def test_a_file_stands_for_its_options_and_those_of_the_command_come_first(file):
    request = parsed("--config", file, "--seed", "9", "--network.hidden-sizes", "4")
    assert request == TrainingRequest(
        algorithm="ppo",
        environment="CartPole-v1",
        settings={
            "total_timesteps": 1024,
            "num_envs": 8,
            "num_steps": 32,
            "learning_rate": "linear:1e-3:1e-4",
            "anneal_lr": False,
            "seed": 9,
            "tensorboard": False,
            "network.hidden_sizes": (4,),
            "network.layer_norm": True,
        },
        environment_options={"max_steps": 30, "transforms": ["reward-scale:0.5", "time"]},
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--env-option", "gravity=9"],
            {"max_steps": 30, "gravity": 9, "transforms": ["reward-scale:0.5", "time"]},
        ),
        (["--env-option", "max_steps=9"], {"max_steps": 9, "transforms": ["reward-scale:0.5", "time"]}),
        (["--transform", "flatten"], {"max_steps": 30, "transforms": ["flatten"]}),
        (["--env-option", 'transforms=["flatten"]'], {"max_steps": 30, "transforms": ["flatten"]}),
    ],
)
def test_options_of_the_environment_override_those_of_a_file_one_by_one(file, words, expected):
    assert parsed("--config", file, *words).environment_options == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--env-option", "gravity=9"], {"max_steps": 30, "gravity": 9, "transforms": ["time:9"]}),
        (["--transform", "flatten"], {"max_steps": 30, "transforms": ["flatten"]}),
        (["--transform", "flatten", "--env-option", "max_steps=8"], {"max_steps": 8, "transforms": ["flatten"]}),
    ],
)
def test_options_of_the_environment_override_those_of_a_run_one_by_one(tmp_path, words, expected):
    options = {"max_steps": 30, "transforms": ["time:9"]}
    file = of_run(tmp_path / "run", graph={"environment_options": options})
    assert parsed("--config", file, *words).environment_options == expected


def test_a_recipe_beside_the_hyperparameters_of_a_run_is_refused(tmp_path):
    file = of_run(tmp_path / "run", graph={"config": {"gamma": 0.5}})
    with raises("recipe-has-no-effect-because", "--recipe cartpole-two-cores", str(file)):
        parsed("--config", file, "--recipe", "cartpole-two-cores")


def test_a_hyperparameter_that_a_run_turned_off_is_off_in_the_next(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Config:
        max_norm: float | None = 0.5
        total_timesteps: int = 100

    monkeypatch.setitem(ALGORITHMS, "own", Algorithm(Config, lambda env, config: None, ""))
    file = of_run(tmp_path / "run", graph={"algorithm": "own", "config": {"max_norm": None}})
    assert resolve(parsed("--config", file)).config.max_norm is None


@pytest.mark.parametrize("named", [["dqn"], ["dqn", "Acrobot-v1"]], ids=len)
def test_names_of_the_command_come_before_those_of_the_file(file, named):
    file.write_text("environment = 'CartPole-v1'\nseed = 3")
    request = parsed(*named, f"--config={file}")
    assert [request.algorithm, request.environment] == [*named, "CartPole-v1"][:2]


def test_modules_and_recipes_of_a_file_count(tmp_path):
    (tmp_path / "run.toml").write_text('import = ["json"]\nrecipe = "cartpole-two-cores"\nnum-envs = 8')
    request = parsed("ppo", "CartPole-v1", "--config", tmp_path / "run.toml")
    assert (request.imports, request.recipe) == (("json",), "cartpole-two-cores")
    config = resolve(request).config
    assert (config.num_envs, config.update_epochs) == (8, 8)


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
        ("missing.toml", None, ("option-cannot-be-read", "missing.toml")),
        ("bad.toml", "seed = = 3", ("is-not-toml", "bad.toml", "line 1")),
        ("other.json", "{}", ("is-not-config-json-run", "other.json")),
        ("broken.json", "{", ("option-cannot-be-read", "broken.json")),
        (
            "algorithm.toml",
            'algorithm = "pp"\nenvironment = "CartPole-v1"',
            ("unknown-name", "algorithm.toml: unknown algorithm"),
        ),
        (
            "environment.toml",
            'algorithm = "ppo"\nenvironment = "CartPole-v3"',
            ("unknown-name", "environment.toml: ", "'CartPole-v3'", "Did you mean CartPole-v1"),
        ),
        ("nameless.toml", "seed = 3", ("neither-command-nor-names-hint", "algorithm")),
        (
            "dates.toml",
            'algorithm = "ppo"\nenvironment = "CartPole-v1"\nseed = 2026-01-01',
            ("expected-number", "dates.toml: seed", "2026", "an integer"),
        ),
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
    with raises(*message):
        parsed("--config", tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sead = 7", ("unknown-option-in-file", "wrong.toml", "sead", "Did you mean seed?")),
        ("lr = 1e-3", ("unknown-option-in-file", "wrong.toml", "lr", "Did you mean learning-rate?")),
        (
            "hidden-sizes = [4]",
            ("unknown-option-in-file", "wrong.toml", "hidden-sizes", "Did you mean network.hidden-sizes?"),
        ),
        (
            "network.hiden_sizes = [4]",
            ("unknown-option-in-file", "network.hiden_sizes", "Did you mean network.hidden-sizes"),
        ),
        (
            "environment-options.max_steps = 3",
            ("unknown-option-in-file", "environment-options", "Did you mean env-option (a table)"),
        ),
        ('imports = ["mine"]', ("unknown-option-in-file", "imports", "Did you mean import?")),
        (
            "nothing-like-it = 1",
            ("unknown-option-in-file", "nothing-like-it", "`rollmill train ALGORITHM --help` lists"),
        ),
        (
            'learning-rate = "1e-3"',
            ("expected-number", "'1e-3'", "a number", "remove the quotes: learning-rate = 1e-3"),
        ),
        (
            'network.layer-norm = "true"',
            ("expected-number", "True or False", "hint: remove the quotes: layer-norm = true"),
        ),
        ("num-envs = 8\nnum_envs = 4", ("and-are-same-option-hint", "wrong.toml: num-envs and num_envs")),
        ('config = "other.toml"', ("cannot-name-another-file-because", "wrong.toml: config")),
        ('num_envs = "many"', ("expected-number", "wrong.toml: num_envs", "'many'", "an integer")),
        ("num_envs = 1.5", ("expected-number", "wrong.toml: num_envs", "1.5", "an integer")),
        ("num_envs = 0", ("must-be-at-least-1", "wrong.toml: num_envs", "0")),
        ('fusion = "ful"', ("unknown-name", "wrong.toml:", "fusion", "'ful'", "Did you mean full?")),
        ("seed = [1, 2]", ("expected-number", "wrong.toml: seed", "[1, 2]", "an integer")),
    ],
    ids=str,
)
def test_a_wrong_key_or_value_is_told_with_file_and_key(tmp_path, line, message):
    file = tmp_path / "wrong.toml"
    file.write_text(f"{line}\n")
    with raises(*message):
        parsed("ppo", "CartPole-v1", "--config", file)


def test_numbers_of_a_file_are_read_as_in_python(tmp_path):
    file = tmp_path / "numbers.toml"
    file.write_text("total-timesteps = 1e6\nlearning-rate = 1\ncheckpoint-seconds = inf\n")
    request = parsed("ppo", "CartPole-v1", "--config", file)
    assert request.settings == {
        "total_timesteps": 1_000_000,
        "learning_rate": 1.0,
        "checkpoint_seconds": float("inf"),
    }
    assert read_request(json.loads(json.dumps(request.to_json())), where="here").options == request.options


def test_strings_of_environment_options_stay_strings(tmp_path):
    file = tmp_path / "strings.toml"
    file.write_text('env-option = {level = "4", switch = "true", course = "linear:1:2", size = 4, on = true}\n')
    request = parsed("ppo", "CartPole-v1", "--config", file)
    assert request.environment_options == {
        "level": "4",
        "switch": "true",
        "course": "linear:1:2",
        "size": 4,
        "on": True,
    }


def test_a_third_name_is_refused(file):
    with raises("is-one-name-too-many", "'extra'", "'ppo'", "'CartPole-v1'"):
        parsed("ppo", "CartPole-v1", "extra", "--config", file)
    with raises("has-no-use-for-hint", "rollmill train ppo", "'extra'"):
        parsed("ppo", "CartPole-v1", "extra")


def test_an_option_that_does_not_exist_is_refused_by_the_command(rollmill, file):
    file.write_text(FILE.replace("seed = 7", "sead = 7"))
    done = rollmill("train", "--config", file)
    assert done.returncode == 2 and "run.toml: unknown option sead" in done.stderr
    assert "Traceback" not in done.stderr


def of_run(folder, **changes):
    """The config.json of a run, as somebody else may have written it."""
    graph = {"algorithm": "ppo", "environment": "CartPole-v1", "config": {}} | changes.pop("graph", {})
    folder.mkdir()
    config = {"graph": graph, "options": {}, "imports": [], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"imports": ["stranger"]},
        {"imports": "stranger"},
        {"graph": {"environment": "gymnasium:stranger:Id-v0"}},
        {"options": {"distribution": "stranger:policy"}},
    ],
)
def test_modules_that_a_run_of_others_names_have_to_be_named_again(tmp_path, changes):
    file = of_run(tmp_path / "run", **changes)
    with raises("was-not-made-here-and-names-code", "stranger", "--import stranger"):
        parse_training(["--config", str(file)])


def test_a_cluster_that_a_run_of_others_names_has_to_be_named_again(tmp_path):
    file = of_run(tmp_path / "run", options={"cluster": "10.0.0.1:6379"})
    with raises("was-not-made-here-and-names-cluster", "10", "0.0.1:6379."):
        parse_training(["--config", str(file)])


def test_modules_that_the_command_names_or_that_the_user_allowed_the_run_are_those_of_the_training(tmp_path):
    file = of_run(tmp_path / "run", imports=["colorsys"])
    assert parse_training(["--config", str(file), "--import", "colorsys"]).request.imports == ("colorsys",)
    remember(RunDirectory(file.parent), ["colorsys"])
    assert parse_training(["--config", str(file)]).request.imports == ("colorsys",)
    copied = file.with_name("other.json")  # a file beside it is not what was allowed
    copied.write_text(file.read_text())
    with raises("was-not-made-here-and-names-code"):
        parse_training(["--config", str(copied)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed = " + "[" * 5000 + "]" * 5000, ("cannot-be-read-is-nested",)),
        ("seed = " + "[" * 40 + "]" * 40, ("option-cannot-be-read", "nested deeper than 32 levels")),
        (".".join("a" * 40) + " = 1", ("option-cannot-be-read", "nested deeper than 32 levels")),
        ("num-envs = 1" + "0" * 400, ("option-cannot-be-read", "... does not fit into 64 bits")),
        ("num-envs = 1" + "0" * 5000, ("is-not-toml",)),
    ],
)
def test_files_beyond_all_bounds_are_refused_in_a_sentence(file, content, message):
    file.write_text(content)
    with raises(*message):
        parsed("ppo", "CartPole-v1", f"--config={file}")


def test_settings_of_a_run_that_are_no_object_are_refused(tmp_path):
    file = of_run(tmp_path / "run", graph={"config": [1]})
    with raises("graph-config-must-be-object", "[1]"):
        parse_training(["--config", str(file)])
