"""Runs whose configuration is another than before: by accident, which is noticed, or on purpose."""

import json
import math
import shutil
from pathlib import Path

import pytest

import rollmill
from rollmill.core.errors import CheckpointError
from rollmill.runs.changes import changed_settings, schedule_notes
from small_ppo import SIZES, STEPS
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of 12 iterations, with all of its checkpoints."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    algorithm = rollmill.ppo(rollmill.make("CartPole-v1"), total_timesteps=12 * STEPS, **SIZES)
    rollmill.train(algorithm, run_dir=directory, checkpoint_iterations=1, keep_last=20, **QUIET)
    return directory


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """The run as it was after six iterations."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    cut(copy, 6)
    return copy


def cut(run: Path, last: int) -> None:
    (run / "summary.json").unlink(missing_ok=True)
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name) > last:
            shutil.rmtree(checkpoint)


def edit(run: Path, section: str, **values) -> None:
    config = json.loads((run / "config.json").read_text())
    part = config["graph"]["config"] if section == "config" else config[section]
    part.update(values)
    (run / "config.json").write_text(json.dumps(config))


def config_of(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())


EDITS = [
    ("config", {"learning_rate": 0.0026}, "config.learning_rate is 0.0026 now and was 0.0025"),
    ("config", {"gamma": 0.98}, "config.gamma is 0.98 now and was 0.99"),
    ("config", {"clip_coef": 0.3}, "config.clip_coef is 0.3 now and was 0.2"),
    ("config", {"ent_coef": 0.02}, "config.ent_coef is 0.02 now and was 0.01"),
    ("config", {"gae_lambda": 0.9}, "config.gae_lambda is 0.9 now and was 0.95"),
    ("config", {"update_epochs": 5}, "config.update_epochs is 5 now and was 1"),
    ("config", {"total_timesteps": 1000}, "config.total_timesteps is 1000 now and was 768"),
    ("config", {"max_grad_norm": "inf"}, 'config.max_grad_norm is "inf" now and was 0.5'),
    ("config", {"num_steps": 16}, "config.num_steps is 16 now and was 8"),
    ("config", {"num_envs": 16}, "config.num_envs is 16 now and was 8"),
    ("options", {"seed": 1}, "seed is 1 now and was 0"),
    ("graph", {"environment": "Probe-ConstantReward-v0"}, 'environment is "Probe-ConstantReward-v0" now and was'),
]


@pytest.mark.parametrize(("section", "values", "message"), EDITS)
@pytest.mark.parametrize("use", [rollmill.resume, rollmill.load])
def test_an_edited_configuration_is_named_with_both_values(run, section, values, message, use):
    edit(run, section, **values)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with raises("is-not-configuration-checkpoint", "6") as caught:
        use(run, **({"quiet": True} if use is rollmill.resume else {}))
    assert message in str(caught.value) and "hint: restore the old values" in str(caught.value)
    assert before == {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"
    }


@pytest.mark.slow
def test_the_hint_is_a_command_where_the_value_may_change(run):
    edit(run, "config", learning_rate=0.001)
    with pytest.raises(CheckpointError, match=r"rollmill resume .*/run --set learning_rate=0\.001$"):
        rollmill.resume(run, quiet=True)
    resumed = rollmill.resume(run, quiet=True, changes={"learning_rate": 0.001})
    assert resumed.summary["status"] == "finished"
    change = {"iteration": 6, "before": {"learning_rate": 0.0025}, "after": {"learning_rate": 0.001}}
    assert config_of(run)["changes"] == [change]


def test_options_that_decide_nothing_may_be_edited(run, finished):
    edit(run, "options", checkpoint_iterations=3, keep_last=2, hang_seconds=77)
    resumed = rollmill.resume(run, quiet=True)
    assert (
        resumed.summary["weights_sha256"] == json.loads((finished / "summary.json").read_text())["weights_sha256"]
    )


@pytest.mark.slow
def test_a_changed_run_resumes_exactly(run, tmp_path, finished):
    changes = {"learning_rate": 1e-4, "gamma": 0.9, "total_timesteps": 15 * STEPS}
    other = tmp_path / "other"
    shutil.copytree(run, other)
    whole = rollmill.resume(run, quiet=True, changes=changes).summary
    rollmill.resume(other, quiet=True, changes=changes)
    cut(other, 9)
    again = rollmill.resume(other, quiet=True).summary
    assert whole["iterations"] == again["iterations"] == 15
    assert whole["weights_sha256"] == again["weights_sha256"]
    assert whole["weights_sha256"] != json.loads((finished / "summary.json").read_text())["weights_sha256"]
    assert config_of(run)["graph"]["config"]["gamma"] == 0.9
    assert rollmill.load(run)([0.0, 0.0, 0.0, 0.0]).shape == ()


@pytest.mark.slow
def test_a_run_that_was_stopped_right_after_a_change_goes_on_with_it(run, tmp_path):
    changed = rollmill.resume(run, quiet=True, changes={"ent_coef": 0.5}).summary
    cut(run, 6)  # the newest checkpoint is from before the change
    assert rollmill.resume(run, quiet=True).summary["weights_sha256"] == changed["weights_sha256"]


@pytest.mark.slow
def test_a_change_whose_checkpoints_are_lost_is_said_to_begin_earlier(run, capsys):
    rollmill.resume(run, quiet=True, changes={"ent_coef": 0.5})
    cut(run, 4)
    rollmill.resume(run)
    assert (
        "the change of ent_coef after iteration 6 takes effect after iteration 4 instead"
        in capsys.readouterr().err
    )
    assert config_of(run)["changes"][0]["iteration"] == 4
    rollmill.load(run)


@pytest.mark.slow
def test_a_finished_run_goes_on_further_and_says_what_the_learning_rate_does(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert rollmill.resume(run, changes={"total_timesteps": "1.6e3"}).summary["iterations"] == 25
    errors = capsys.readouterr().err
    assert "changed after iteration 12: total_timesteps 768 -> 1600" in errors
    assert "It continues at 0.0013 instead of 0, and falls to 0 after iteration 25" in errors
    lines = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 26))


def test_a_longer_run_says_what_random_actions_and_the_environment_do():
    env = rollmill.make("CartPole-v1", gravity="linear:1:21", pole_mass="uniform:0.1:0.2")
    graph = rollmill.dqn(env, total_timesteps=8_000, num_envs=4, num_steps=4, exploration_fraction=0.25)
    before = {**graph.settings["config"], "total_timesteps": 1_600}
    notes = list(schedule_notes(before, graph.settings["config"], graph, 100))  # of 100 iterations, now 500
    assert [note for note in notes if "learning rate" not in note] == [
        "note: gravity of the environment has a schedule over total_timesteps. It continues at 5 instead of 21, "
        "and changes to 21 after iteration 500",
        "note: the share of random actions has a schedule over total_timesteps. It continues at 0.24 instead of "
        "0.05, and falls to 0.05 after iteration 125",
    ]
    assert not list(schedule_notes(before, before, graph, 50))


REFUSED = [
    ({"num_envs": 16}, ("cannot-be-changed-when-run", "num_envs")),
    ({"anneal_lr": False}, ("cannot-be-changed-when-run", "anneal_lr")),
    ({"lr": 1e-4}, ("unknown-name", "hyperparameter", "'lr'", "Did you mean learning_rate?")),
    (
        {"learning_rat": 1e-4},
        ("unknown-name", "hyperparameter", "'learning_rat'", "Did you mean learning_rate"),
    ),
    ({"learning_rate": "fast"}, ("expected-number", "learning_rate", "'fast'", "a number or a schedule")),
    ({"learning_rate": None}, ("expected-number", "learning_rate", "None", "a number")),
    ({"learning_rate": -1.0}, ("expected-number", "learning_rate", "-1.0", "at least 0")),
    ({"gamma": "1.5"}, ("out-of-bounds", "gamma", "1.5", "lie between 0 and 1")),
    ({"total_timesteps": 100}, ("total-timesteps-lies-behind-steps", "100", "384")),
    ({"update_epochs": 2}, ("cannot-be-changed-while-anneal", "update_epochs")),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_change_that_cannot_be_made_is_refused(run, changes, message):
    before = (run / "config.json").read_bytes()
    with raises(*message):
        rollmill.resume(run, quiet=True, changes=changes)
    assert (run / "config.json").read_bytes() == before


def test_a_finished_run_is_found_before_anything_is_compiled(finished, capsys, monkeypatch):
    monkeypatch.setattr("rollmill.training.preparing.lower", pytest.fail)
    run = rollmill.resume(finished)
    assert run.summary["status"] == "finished" and run.exit_code == 0
    assert capsys.readouterr().err == "this run has already finished. Nothing was changed.\n"


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr("rollmill.training.preparing.lower", pytest.fail)
    algorithm = rollmill.ppo(rollmill.make("CartPole-v1"), total_timesteps=STEPS, **SIZES)
    (tmp_path / "file").write_text("")
    for root in (Path("/proc/rollmill/run"), tmp_path / "file" / "run"):
        with raises("cannot-be-created-hint-choose", root):
            rollmill.train(algorithm, run_dir=root, **QUIET)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_with_a_schedule_goes_on_exactly_and_logs_its_rate(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    rate = "cosine:2e-3:1e-3"
    algorithm = rollmill.ppo("CartPole-v1", total_timesteps=8 * STEPS, learning_rate=rate, **SIZES)
    trained = rollmill.train(algorithm, run_dir=whole, checkpoint_iterations=1, keep_last=20, **QUIET).summary
    assert config_of(whole)["graph"]["config"]["learning_rate"] == rate
    assert config_of(whole)["graph"]["custom"] == []
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    expected = [1.5e-3 + 0.5e-3 * math.cos(math.pi * n / 8) for n in range(8)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected, rel=1e-5)
    shutil.copytree(whole, part)
    cut(part, 3)
    assert rollmill.resume(part, quiet=True).summary["weights_sha256"] == trained["weights_sha256"]
    assert rollmill.evaluate(part, episodes=2).returns.size == 2
    cut(part, 3)
    resumed = rollmill.resume(part, quiet=True, changes={"learning_rate": "linear:1e-3:0"}).summary
    assert resumed["weights_sha256"] != trained["weights_sha256"]
    assert config_of(part)["changes"][0]["after"] == {"learning_rate": "linear:1e-3:0"}


def test_numbers_get_and_lose_schedules_exactly(run, tmp_path, capsys):
    """After three of 12 iterations the share is a quarter, whether the run counted updates before or not."""
    cut(run, 3)
    rollmill.resume(run, changes={"ent_coef": "linear:0.04:0", "gamma": "cosine:0.9:1"})
    note = "ent_coef has a schedule over total_timesteps. It continues at 0.03 instead of 0.01"
    assert note in "".join(capsys.readouterr())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["schedules/ent_coef"] for row in rows[3:6]] == pytest.approx([0.03, 0.03 - 1 / 300, 0.07 / 3])
    assert rows[3]["schedules/gamma"] == pytest.approx(0.95 - 0.05 * math.cos(math.pi / 4))
    finished, interrupted = weights_digest(run), tmp_path / "interrupted"
    shutil.copytree(run, interrupted)
    cut(interrupted, 7)
    assert rollmill.resume(interrupted, quiet=True).summary["weights_sha256"] == finished
    cut(interrupted, 7)
    rollmill.resume(interrupted, quiet=True, changes={"ent_coef": "0.01", "gamma": "0.99"})
    last = json.loads((interrupted / "metrics.jsonl").read_text().splitlines()[-1])
    assert "schedules/ent_coef" not in last


def weights_digest(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


@pytest.mark.parametrize(
    ("before", "after", "hint"), [(1e-3, "linear:1e-3:0", "a number"), ("linear:1:0", "0.1", "constant:VALUE")]
)
def test_a_schedule_begins_only_where_updates_are_counted(before, after, hint):
    graph = rollmill.ppo("CartPole-v1", learning_rate=before, anneal_lr=False)
    settings = json.loads(json.dumps(graph.settings))
    with raises("learning-rate-cannot-be-set", after, hint):
        changed_settings(settings, {"learning_rate": after}, where="config.json")
