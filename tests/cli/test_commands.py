"""The command line: what it prints, where it writes, and what it says of bad input."""

import json
import shutil
import sys

import pytest

from .conftest import SMALL, files_under

QUICK = [*SMALL, "--total-timesteps", 8 * 8 * 4]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment_variables):
    """A finished run that the tests of this file only read."""
    import subprocess

    root = tmp_path_factory.mktemp("trained")
    command = [
        sys.executable,
        "-m",
        "rollmill",
        "train",
        "ppo",
        "CartPole-v1",
        *map(str, QUICK),
        "--run-dir",
        "run",
    ]
    done = subprocess.run(command, cwd=root, env=environment_variables, capture_output=True, text=True, check=True)
    return root / "run", done


def test_training_prints_progress_and_what_to_do_next(trained):
    run, done = trained
    assert "steps/s" in done.stderr and "left" in done.stderr and "return" in done.stderr
    assert "compiled in" in done.stderr
    assert "run: run" in done.stdout and "rollmill evaluate run" in done.stdout


def test_a_run_directory_holds_everything(trained):
    run, _ = trained
    config = json.loads((run / "config.json").read_text())
    assert config["graph"]["environment"] == "CartPole-v1" and config["graph"]["config"]["num_envs"] == 8
    assert config["options"]["seed"] == 0
    assert json.loads((run / "versions.json").read_text())["versions"]["jax"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows] == [64, 128, 192, 256]
    assert {"episode/return", "episode/length", "steps_per_second", "losses/policy"} <= rows[-1].keys()
    assert list((run / "tensorboard").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    expected = {"final_return", "best_return", "env_steps", "seconds", "compile_seconds", "steps_per_second"}
    assert expected | {"weights_sha256"} <= summary.keys()
    assert len(summary["weights_sha256"]) == 64


def test_evaluate(trained, rollmill):
    run, _ = trained
    before = files_under(run)
    done = rollmill("evaluate", run, "--episodes", 10, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["episodes"] == 10 and 1 <= result["mean_return"] <= 500
    assert result["mean_length"] == result["mean_return"]  # CartPole pays one a step
    assert files_under(run) == before
    again = json.loads(rollmill("evaluate", run, "--episodes", 10, "--json").stdout)
    assert again == result


def test_evaluate_on_gymnasium(trained, rollmill):
    run, _ = trained
    done = rollmill("evaluate", run, "--env", "gymnasium:CartPole-v1", "--episodes", 6, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["environment"] == "gymnasium:CartPole-v1" and result["episodes"] == 6
    assert result["mean_length"] == result["mean_return"] >= 1


@pytest.mark.slow
def test_quiet_shows_nothing_while_training(rollmill):
    done = rollmill("train", "ppo", "CartPole-v1", *QUICK, "--run-dir", "quiet", "--quiet")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.slow
def test_several_seeds_have_a_summary_over_them(rollmill, tmp_path):
    done = rollmill("train", "ppo", "CartPole-v1", *QUICK, "--num-seeds", 3, "--seed", 5, "--run-dir", "seeds")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "seeds/summary.json").read_text())
    assert summary["seeds"] == [5, 6, 7] and len(summary["final_return_per_seed"]) == 3
    assert summary["total_env_steps"] == 3 * summary["env_steps"] == 3 * 256
    mean = sum(summary["final_return_per_seed"]) / 3
    assert summary["final_return"] == pytest.approx(mean)
    first = rollmill("evaluate", "seeds", "--episodes", 4).stdout
    assert "training seed 5: mean return" in first
    other = json.loads(rollmill("evaluate", "seeds", "--episodes", 4, "--train-seed", 6, "--json").stdout)
    assert other["train_seed"] == 6
    each = rollmill("evaluate", "seeds", "--episodes", 4, "--all-seeds").stdout.splitlines()
    assert [line.partition(": ")[0].split()[-1] for line in each[:3]] == ["5", "6", "7"]
    assert each[0] == first.strip() and each[3].startswith("3 training seeds: mean return ")
    wrong = rollmill("evaluate", "seeds", "--train-seed", 4)
    assert wrong.returncode == 2 and "seed=4 was not trained in seeds, which has the seeds 5, 6, 7" in wrong.stderr


@pytest.mark.slow
def test_the_run_is_named_when_the_user_names_none(rollmill, tmp_path):
    assert rollmill("train", "ppo", "CartPole-v1", *QUICK, "--no-tensorboard").returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-CartPole-v1-seed0-2")


def test_list_and_doctor_and_help(rollmill):
    listed = rollmill("list").stdout
    assert "CartPole-v1" in listed and "ppo" in listed and "cartpole-two-cores" in listed
    report = rollmill("doctor")
    assert report.returncode == 0
    assert "jax " in report.stdout and "cpu" in report.stdout and "computes: yes" in report.stdout
    help_ = rollmill("train", "ppo", "--help").stdout
    assert "--num-envs" in help_ and "Number of parallel environments" in help_ and "(default: 64)" in help_


BAD = {
    "environment": (["train", "ppo", "CartPol-v1"], "unknown environment 'CartPol-v1'. Did you mean CartPole-v1"),
    "near option": (
        ["train", "ppo", "CartPole-v1", "--learnin-rate", "1"],
        "rollmill: unknown option --learnin-rate. Did you mean --learning-rate?",
    ),
    "far option": (
        ["train", "ppo", "CartPole-v1", "--qqq"],
        "rollmill: unknown option --qqq. `rollmill train ppo --help` lists the options.",
    ),
    "option of others": (
        ["train", "ppo", "CartPole-v1", "--sharing", "tagger=none"],
        "rollmill: unknown option --sharing. It is an option of mappo, ippo, vdn, qmix. `rollmill train ppo",
    ),
    "algorithm": (["train", "pp", "CartPole-v1"], "unknown algorithm 'pp'. Did you mean ppo"),
    "option first": (
        ["plan", "--search-plan", "ppo", "CartPole-v1"],
        "the algorithm must come before --search-plan",
    ),
    "run directory of a profile": (
        ["profile", "ppo", "CartPole-v1", "--run-dir", "x"],
        "--run-dir has no effect, because the profiled run is temporary. hint: use --output for the directory of",
    ),
    "windows": (
        ["profile", "ppo", "CartPole-v1", "--windows", "100000"],
        "windows=100000 must lie between 1 and 1000",
    ),
    "command": (["trian"], "unknown command 'trian'. Did you mean train"),
    "option": (["train", "ppo", "CartPole-v1", "--num-env", "3"], "--num-envs"),
    "recipe": (["train", "ppo", "CartPole-v1", "--recipe", "cartpol"], "unknown recipe 'cartpol'"),
    "minibatches": (
        ["train", "ppo", "CartPole-v1", "--num-envs", "5", "--num-steps", "3", "--num-minibatches", "4"],
        (
            "15 samples (num_envs x num_steps) cannot be divided into num_minibatches=4 equal parts. "
            "Nearest values that divide them: "
        ),
    ),
    "too few steps": (["train", "ppo", "CartPole-v1", "--total-timesteps", "10"], "less than one iteration"),
    "zero": (["train", "ppo", "CartPole-v1", "--num-envs", "0"], "num_envs=0 must be at least 1"),
    "seeds": (["train", "ppo", "CartPole-v1", "--num-seeds", "0"], "num_seeds=0 must be at least 1"),
    "gamma": (["train", "ppo", "CartPole-v1", "--gamma", "1.5"], "gamma=1.5 must lie between 0 and 1"),
    "devices": (["train", "ppo", "CartPole-v1", "--devices", "3"], "3 devices cannot hold equal shares"),
    "no run": (["resume", "nowhere"], "nowhere does not exist"),
    "not a run": (["evaluate", "."], "is not the directory of a run"),
    "import": (["train", "ppo", "CartPole-v1", "--import", "no_such_module"], "cannot import 'no_such_module'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_exit_code_2(rollmill, tmp_path, case):
    arguments, message = BAD[case]
    done = rollmill(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert files_under(tmp_path) == {}


def test_an_occupied_run_directory_is_left_as_it_was(trained, rollmill):
    run, _ = trained
    before = files_under(run)
    done = rollmill("train", "ppo", "CartPole-v1", *QUICK, "--run-dir", run)
    assert done.returncode == 2 and f"already contains a run. hint: `rollmill resume {run}`" in done.stderr
    assert files_under(run) == before


def test_a_damaged_configuration_is_told(trained, rollmill, tmp_path):
    shutil.copytree(trained[0], tmp_path / "damaged")
    (tmp_path / "damaged/config.json").write_text("{")
    before = files_under(tmp_path)
    done = rollmill("resume", "damaged")
    assert done.returncode == 2 and "config.json cannot be read" in done.stderr and "Traceback" not in done.stderr
    assert files_under(tmp_path) == before


def test_a_checkpoint_of_another_network_is_refused(trained, rollmill, tmp_path):
    shutil.copytree(trained[0], tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    config["graph"]["config"]["network"]["hidden_sizes"] = [32, 32]
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    before = files_under(tmp_path / "other/checkpoints")
    done = rollmill("resume", "other")
    assert done.returncode == 2 and "is not the configuration of checkpoint" in done.stderr
    assert "config.network.hidden_sizes is [32, 32] now and was [8]" in done.stderr
    assert files_under(tmp_path / "other/checkpoints") == before


MODULE = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, rollmill
from gymnasium import spaces

def reset(key, params):
    return jnp.zeros(1), jnp.int32(0)

def step(key, state, action, params):
    state = state + 1
    {line}
    return rollmill.Timestep(jnp.zeros(1), state, jnp.float32(1), state >= 5, jnp.asarray(False), {{}})

def corridor():
    '''A corridor of five steps.'''
    space = {space}
    return rollmill.Environment("Corridor-v0", reset, step, spaces.Box(0, 1, (1,), np.float32), space)

rollmill.register("Corridor-v0", corridor)
"""


def write_module(tmp_path, *, line="pass", space="spaces.Discrete(2)"):
    (tmp_path / "corridors.py").write_text(MODULE.format(line=line, space=space))
    return ["train", "ppo", "Corridor-v0", "--import", "corridors", *QUICK, "--run-dir", "run", "--no-tensorboard"]


@pytest.mark.slow
def test_an_own_environment_by_its_name(rollmill, tmp_path):
    train = write_module(tmp_path)
    here = {"env": {"PYTHONPATH": str(tmp_path)}}
    assert rollmill(*train, **here).returncode == 0
    evaluated = rollmill("evaluate", "run", "--import", "corridors", "--json", **here)
    assert json.loads(evaluated.stdout)["mean_return"] == 5
    own = rollmill("evaluate", "run", "--json", **here)
    assert own.returncode == 0, "the modules of a run that was made here are imported again"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    foreign = rollmill("evaluate", "copy", **here)
    assert foreign.returncode == 2 and "--import corridors" in foreign.stderr
    assert rollmill("evaluate", "copy", "--trust", **here).returncode == 0
    assert rollmill("evaluate", "copy", **here).returncode == 0, "trust is remembered"


def test_an_environment_that_raises_shows_its_own_line(rollmill, tmp_path):
    train = write_module(tmp_path, line="raise KeyError('wheel')")
    done = rollmill(*train, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Corridor-v0: step raised KeyError: 'wheel'" in done.stderr
    assert "corridors.py:10: raise KeyError('wheel')" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_action_space_that_ppo_cannot_handle(rollmill, tmp_path):
    train = write_module(tmp_path, space="spaces.Dict(a=spaces.Discrete(2))")
    done = rollmill(*train, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Dict" in done.stderr and "supported" in done.stderr.lower()
    assert not (tmp_path / "run").exists()
