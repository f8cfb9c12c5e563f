"""`--search-plan` of `rollmill plan` and `rollmill train`: a whole search, and what it refuses."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from rollmill.cli import plan as plan_command, plan_search_options as searching
from rollmill.cli.main import main
from rollmill.cli.plan import format_memory
from rollmill.cli.requests import parse_training
from rollmill.plan_search import orders
from rollmill.plan_search.compiled_program import MemoryNeed
from rollmill.plan_search.search.candidate import Candidate
from rollmill.plan_search.search.result_table import CandidateRow, PlanTable

SIZES = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "1280"]
PPO = ["ppo", "CartPole-v1", *SIZES]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as exit_code:
            main(list(arguments))
        captured = capsys.readouterr()
        assert exit_code.value.code == 2
        assert "Traceback" not in captured.err + captured.out
        assert not list(tmp_path.iterdir())
        return captured.err + captured.out

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search-plan", "--budget", "0"], "rollmill: budget=0 seconds must be greater than 0 and finite."),
        (["--search-plan", "--budget", "-3"], "rollmill: budget=-3 seconds must be greater than 0 and finite."),
        (["--search-plan", "--budget", "nan"], "rollmill: budget=nan seconds must be greater than 0 and finite."),
        (
            ["--search-plan", "--objective", "fast"],
            "rollmill: unknown --objective 'fast'. Known: grow-batch, keep-batch.",
        ),
        (["--search-plan", "--plan", "x.json"], "rollmill: --plan has no effect with --search-plan"),
        (["--search-plan", "--cluster", "ray"], "rollmill: --cluster has no effect with --search-plan"),
        (["--budget", "3"], "rollmill: --budget has no effect without --search-plan"),
        (["--search-plan", "--memory"], "rollmill: --memory has no effect with --search-plan"),
        (
            ["--memory", "--distribution", "single-learner-coarse", "--actors", "2"],
            "the workers of single-learner-coarse compile programs of their own. hint: use `--search-plan`",
        ),
        (["--fresh"], "rollmill: --fresh has no effect without --search-plan"),
        (["--objective", "grow-batch"], "rollmill: --objective has no effect without --search-plan"),
        (
            ["--search-plan", "--distribution", "central", "--actors", "64"],
            "distribution=central actors=64 matches none of the searched plans",
        ),
    ],
)
def test_a_search_that_cannot_be_made(refused, options, message):
    assert message in refused("plan", *PPO, *options)


@pytest.mark.parametrize("options", [[], ["--search-plan"]])
def test_where_a_plan_cannot_be_written_none_is_searched_for(refused, monkeypatch, tmp_path, options):
    monkeypatch.setattr(plan_command, "find_plan", None)
    monkeypatch.setattr(plan_command, "choose_plan", None)
    said = refused("plan", *PPO, *options, "--output", "nowhere/plan.json")
    assert "rollmill: nowhere/plan.json cannot be written: the folder nowhere does not exist." in said


def test_an_existing_file_is_replaced_by_a_plan_only_if_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "plan.json"
    file.write_text("{}")
    for options, code in (([], 2), (["--force"], 0)):
        assert file.read_text() == "{}"
        with pytest.raises(SystemExit) as exit_code:
            main(["plan", *PPO, "--no-show", "--output", "plan.json", *options])
        assert exit_code.value.code == code
    assert "plan.json already exists. hint: --force" in capsys.readouterr().err
    assert json.loads(file.read_text())["place"] == "program"


@pytest.mark.slow
def test_the_memory_is_said_before_anything_runs(rollmill, tmp_path):
    done = rollmill("plan", *PPO, "--memory", "--output", "plan.json")
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"^memory: (\d+) MB \((\d+) MB for training, (\d+) MB for the process\), of ", done.stdout, re.M
    )
    assert said, done.stdout
    total, training, process = map(int, said.groups())
    assert process > 50 and abs(total - training - process) <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (
            MemoryNeed(2 * 10**9, 1, None, 140 * 10**9),
            "memory: 2.00 GB on the device, of 140.00 GB",
        ),
        (MemoryNeed(2 * 10**9, 2, None, None), "memory: 2.00 GB on each of 2 devices"),
        (
            MemoryNeed(10**9, 2, 10**9, 2 * 10**9),
            "\nThis does not fit. hint: lower num_envs, num_steps",
        ),
    ],
)
def test_a_need_is_compared_with_what_there_is(need, text):
    assert text in format_memory(need)


def test_a_training_whose_search_fails_does_not_begin(rollmill, tmp_path):
    done = rollmill("train", *PPO, "--search-plan", "--budget", "0", "--run-dir", "run")
    assert done.returncode == 2
    assert "rollmill: budget=0 seconds must be greater than 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_training_takes_the_plan_in_place_of_what_was_searched(monkeypatch):
    searched = []

    class Search:
        def wait(self):
            Path(searched[0].search.output).write_text("{}")
            return 0

    monkeypatch.setattr(orders, "start_child", lambda order, **_: searched.append(order) or Search())
    words = [
        *PPO,
        "--search-plan",
        "--budget=3",
        "--seed",
        "1",
        "--devices",
        "2",
        "--fusion=off",
        "--asynchronous",
    ]
    parsed = parse_training([*words, "--env-option", "max_steps=5", "--run-dir", "grow-batch"])
    with searching.request_with_plan(parsed.request, parsed.searching) as request:
        plan = request.settings["plan"]
        assert Path(plan).is_file() and request == parsed.request.without(
            ("devices", "fusion", "asynchronous")
        ).changed({"plan": plan})
    assert not Path(plan).exists()
    order = searched[0].search
    assert "run_dir" not in order.request.settings and order.request.settings["devices"] == 2
    assert (order.budget, order.objective, order.fresh) == (3.0, "keep-batch", False)


@pytest.mark.slow
def test_a_plan_is_searched_for_kept_and_trained_with(rollmill, tmp_path):
    search = ["plan", *PPO, "--search-plan", "--budget", "1", "--place", "program", "--output", "plan.json"]
    done = rollmill(*search)
    assert done.returncode == 0, done.stderr
    head, first, *rest = done.stdout.splitlines()
    assert head.split()[0] == "candidate"
    measured = r"gpu-only \(program\) fusion=off +[\d.]+ k? +[\d.]+ k? +\d+ MB +\d+ MB"
    assert re.match(rf"{measured} +chosen +the only candidate that could be measured", first)
    assert sum("the time budget was used up" in line for line in rest) >= 1
    assert sum("1,280 steps were requested" in line for line in rest) >= 1
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["version"] == 2
    assert plan["settings"] == {"devices": 1, "fusion": "off", "num_envs": 8}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    began = time.monotonic()
    again = rollmill(*search, "--force")
    assert again.returncode == 0, again.stderr
    assert "by an earlier search" in again.stdout
    assert again.stdout.splitlines()[:2] == [head, first]
    assert time.monotonic() - began < 30

    # The number of environments is the plan's, where nobody gives one.
    rest = ["--num-steps", "8", "--total-timesteps", "640", "--plan", "plan.json"]
    done = rollmill("train", "ppo", "CartPole-v1", *rest, "--run-dir", "run", "--quiet")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["graph"]["config"]["num_envs"] == 8
    assert (config["options"]["devices"], config["options"]["fusion"]) == (1, "off")
    assert config["plan"]["version"] == 1
    done = rollmill("train", "ppo", "CartPole-v1", *rest, "--num-envs", "16")
    assert done.returncode == 2
    assert (
        "rollmill: the plan plan.json was chosen for num_envs=8, but the algorithm has num_envs=16" in done.stderr
    )
    done = rollmill("train", "ppo", "CartPole-v1", *rest, "--fusion", "full")
    assert done.returncode == 2
    assert "rollmill: fusion=full contradicts plan=plan.json, which has fusion=off" in done.stderr


@pytest.mark.slow
def test_a_plan_on_two_devices_gets_them(rollmill, tmp_path):
    groups = [{"name": "all", "fragments": ["environment", "policy", "gradients", "update"]}]
    plan = {"version": 2, "distribution": "gpu-only", "place": "program", "groups": groups}
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "settings": {"devices": 2}}))
    done = rollmill("train", *PPO, "--plan", "plan.json", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "for 2 x cpu" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_training_searches_first(rollmill, tmp_path):
    sizes = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "200000"]
    done = rollmill(
        "train", "ppo", "CartPole-v1", *sizes, "--search-plan", "--budget", "40", "--fresh", "--place", "program",
        "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^chosen: gpu-only \(program\) fusion=", done.stdout, re.M)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert "plan" not in config["options"]
    assert config["options"]["fusion"] in ("off", "full", "rollout")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_a_batch_that_may_grow(rollmill, tmp_path):
    options = ["--objective", "grow-batch", "--budget", "120", "--devices", "1", "--place", "program"]
    options += ["--fusion", "off"]  # on a busy machine, one of the few candidates may take half a minute
    done = rollmill("plan", *PPO, "--search-plan", *options, "--fresh", "--output", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "a different batch size changes how the algorithm learns" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["settings"]["num_envs"] > 8


@pytest.mark.slow
def test_environments_of_python(rollmill, tmp_path):
    words = [
        "ppo",
        "gymnasium:CartPole-v1",
        *SIZES,
        "--total-timesteps",
        "200000",
        "--search-plan",
        "--budget",
        "60",
    ]
    done = rollmill("plan", *words, "--fresh", "--output", "plan.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["place"] == "processes"
    table = done.stdout.splitlines()
    assert sum("  chosen  " in line or "  slower  " in line for line in table) >= 2
    assert not any("(program)" in line for line in table)


@pytest.mark.slow
def test_a_search_that_is_stopped_leaves_nothing_behind(rollmill, tmp_path):
    search = rollmill.start("plan", *PPO, "--total-timesteps", "10000000", "--search-plan", "--fresh")
    time.sleep(12)
    search.send_signal(signal.SIGINT)
    output, errors = search.communicate(timeout=60)
    assert search.returncode == 130
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_goes_on_with_the_devices_of_a_plan_and_its_own_kernels(rollmill, tmp_path):
    done = rollmill("train", *PPO, "--fusion", "off", "--run-dir", "run", "--quiet")
    assert done.returncode == 0, done.stderr
    groups = [{"name": "all", "fragments": ["environment", "policy", "gradients", "update"]}]
    plan = {"version": 2, "distribution": "gpu-only", "place": "program", "groups": groups}
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "settings": {"devices": 2, "fusion": "full"}}))
    done = rollmill("resume", "run", "--plan", "plan.json", "--set", "total_timesteps=2560")
    assert done.returncode == 0, done.stderr
    assert "for 2 x cpu" in done.stdout + done.stderr
    assert "kernel" not in done.stdout + done.stderr


def test_a_search_that_did_not_reach_all_candidates_says_so(capsys):
    rows = (
        CandidateRow(Candidate(), "chosen", "the only candidate that could be measured", measured_speed=10.0),
        CandidateRow(Candidate(fusion="full"), "not reached", "the time budget was used up"),
    )
    plan_command._print(PlanTable(rows, 21.0), is_stored=False, budget=20.0)
    assert "1 of 2 candidates were not measured. --budget 80 might find a faster plan." in capsys.readouterr().out
    plan_command._print(PlanTable(rows[:1], 21.0), is_stored=False, budget=20.0)
    assert "not reached" not in capsys.readouterr().out
