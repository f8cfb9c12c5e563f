"""Placements that cannot be: the command line has one message, exit code 2, and writes nothing."""

import json
import re
from functools import partial

import pytest

import rollmill
from rollmill.cli.main import main
from rollmill.planning.placement import PLACEMENT

SIZES = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "640", "--run-dir", "run"]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command that must fail, in this process; returns what it says."""

    def run(*arguments, leaves=()):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as exit_code:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert exit_code.value.code == 2
        assert "Traceback" not in captured.err + captured.out
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(leaves)
        return captured.err + captured.out

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--distribution", "multi-lerner"],
            "rollmill: unknown distribution policy 'multi-lerner'. Did you mean multi-learner",
        ),
        (["--distribution", "nowhere:policy"], "rollmill: distribution 'nowhere:policy': cannot import 'nowhere'"),
        (
            ["--distribution", "json:nothing"],
            "rollmill: distribution 'json:nothing': json has no function 'nothing'",
        ),
        (
            ["--distribution", "single-learner-fine", "--workers", "3"],
            "rollmill: group 'environment' has replicas=3, which do not divide num_envs=8 equally. Nearest "
            "numbers of replicas that do: 2 or 4.",
        ),
        (
            ["--distribution", "environments", "--workers", "8", "--actors", "3"],
            "rollmill: environments: group 'environment' has replicas=8 and 'policy' replicas=3. One must be a "
            "multiple of the other",
        ),
        (["--distribution", "central", "--workers", "0"], "workers=0 must be at least 1."),
        (
            ["--workers", "16"],
            "rollmill: workers=16 has no effect, because the distribution policy gpu-only uses learners, "
            "asynchronous. hint: leave it out, or choose a distribution policy that uses workers: environments, "
            "multi-learner, single-learner-fine.",
        ),
        (["--host", "10.0.0.1"], "rollmill: host=10.0.0.1 has no effect with place=program"),
        (["--clip-coef", "-1"], "rollmill: clip_coef=-1.0 must be greater than 0 and finite."),
        (["--ent-coef", "nan"], "rollmill: ent_coef=nan must be at least 0 and finite."),
        (["--learning-rate", "inf"], "rollmill: learning_rate=inf must be at least 0 and finite."),
        (["--target-kl", "-1"], "rollmill: target_kl=-1.0 must be at least 0 and finite."),
        (["--asynchronous"], "rollmill: gpu-only cannot be asynchronous"),
        (
            ["--distribution", "multi-learner", "--asynchronous"],
            "rollmill: multi-learner cannot be asynchronous",
        ),
        (
            ["--distribution", "central", "--asynchronous", "--normalize-observations"],
            "rollmill: asynchronous central sends only gradients to the update",
        ),
        (
            ["--distribution", "single-learner-coarse", "--num-seeds", "2"],
            "rollmill: num_seeds=2 needs a single program, but place=processes has several programs. hint: "
            "use distribution=gpu-only, or start a run for each seed.",
        ),
        (
            ["--distribution", "single-learner-coarse", "--place", "program"],
            "rollmill: single-learner-coarse has 2 groups, which do not fit into one program. hint: use",
        ),
        (["--place", "thread"], "thread"),
        (
            ["--cluster", "raj"],
            "rollmill: cluster='raj' is not valid, expected ray, auto, ray://HOST:PORT or HOST:PORT.",
        ),
        (["--plan", "nowhere.json"], "rollmill: the plan nowhere.json cannot be read: No such file or directory."),
    ],
)
def test_what_cannot_be_placed_is_said_before_anything_is_written(refused, options, message):
    assert message in refused("train", "ppo", "CartPole-v1", *SIZES, *options)


def test_devices_belong_to_one_program(refused):
    said = refused(
        "train", "ppo", "CartPole-v1", *SIZES, "--distribution", "single-learner-coarse", "--devices", "2"
    )
    assert "rollmill: devices=2 applies to a single program. hint: with place=processes, give learners=2." in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "the plan has version 7, but this Rollmill reads only 1 and 2."),
        ({"groups": []}, "mine: a partition needs at least one group."),
        ({"place": "clouds"}, "unknown place 'clouds'."),
        ({"grups": []}, "the plan: grups is unknown. Did you mean groups?"),
    ],
)
def test_a_plan_that_is_wrong(refused, tmp_path, change, message):
    groups = [{"name": "all", "fragments": ["environment", "policy", "gradients", "update"]}]
    plan = {"version": 1, "distribution": "mine", "place": "program", "groups": groups, **change}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    said = refused("train", "ppo", "CartPole-v1", *SIZES, "--plan", "plan.json", leaves=["plan.json"])
    assert f"rollmill: plan.json: {message}" in said
    said = refused("plan", "ppo", "CartPole-v1", "--plan", "plan.json", leaves=["plan.json"])
    assert f"rollmill: plan.json: {message}" in said


@pytest.mark.slow
def test_a_run_goes_on_only_where_it_can(refused, tmp_path, monkeypatch):
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), num_envs=8, num_steps=8, total_timesteps=64)
    rollmill.train(graph, run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused = partial(refused, "resume", "run", "--set", "total_timesteps=128", leaves=["run"])
    said = refused("--distribution", "centrl")
    assert "rollmill: unknown distribution policy 'centrl'. Did you mean central" in said
    said = refused("--distribution", "central", "--actors", "5")
    assert "replicas=5, which do not divide num_shards=8 equally. Nearest numbers of replicas that do: 4" in said
    said = refused("--asynchronous")
    assert "rollmill: gpu-only cannot be asynchronous" in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_takes_every_option_of_placement_as_train_does(capsys):
    flags = {}
    for command in (["resume"], ["train", "ppo"]):
        with pytest.raises(SystemExit):
            main([*command, "--help-all"])
        flags[command[0]] = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    wanted = {f"--{name.replace('_', '-')}" for name in PLACEMENT} | {"--no-asynchronous"}
    assert wanted <= flags["resume"] and wanted <= flags["train"]


@pytest.mark.parametrize("rate", ["0", "-1"])
def test_a_plan_is_drawn_for_some_rate(refused, rate):
    assert "must be greater than 0" in refused("plan", "ppo", "CartPole-v1", "--rate", rate)
    said = refused("plan", "ppo", "CartPole-v1", "--output", "nowhere/plan.json")
    assert "rollmill: nowhere/plan.json cannot be written: the folder nowhere does not exist." in said
