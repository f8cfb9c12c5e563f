"""`rollmill sweep`: trials as processes, their failures, and going on after the sweep was killed."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recorded_runs import recorded
from rollmill.gpus.machine_parts import share_of_cores
from wordings import raises

TINY = ["--num-envs", "4", "--num-steps", "8", "--num-minibatches", "1", "--network.hidden-sizes", "4"]
SHORT = ["ppo", "CartPole-v1", "--total-timesteps", "128", *TINY]
LONG = ["ppo", "CartPole-v1", "--total-timesteps", str(4 * 8 * 10**6), "--checkpoint-seconds", "0.2", *TINY]
ASHA = ["--stop-early", "asha"]


def sweep(*words):
    return [sys.executable, "-m", "rollmill", "sweep", *map(str, words)]


def table(folder: Path) -> list[dict]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def wait_until(happens, process):
    deadline = time.monotonic() + 240
    while not happens():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))


def trial_process(run: Path) -> int | None:
    """The process that trains a run, by the log that it writes."""
    log = str(run.with_suffix(".log"))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "fd" / "1") == log:
                return int(folder.name)
    return None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo", "--over", "seed=0..1"], "rollmill sweep ppo needs ENVIRONMENT"),
        (SHORT, "a sweep needs values to try"),
        ([*SHORT, "--over", "seed"], "must be OPTION=V1,V2"),
        (
            [*SHORT, "--over", "learning-rte=1,2"],
            "unknown option 'learning-rte'. Did you mean learning-rate",
        ),
        ([*SHORT, "--over", "lr=1e-3,1e-4"], "unknown option 'lr'. Did you mean learning-rate?"),
        ([*SHORT, "--over", "gamma=0.9,1.5"], r"trial 1 \(gamma=1.5\): .*gamma=1.5"),
        ([*SHORT, "--over", "env-option.max_steps=1e,True"], "write true"),
        ([*SHORT, "--over", "seed=0..1", "--at-once", "0"], "--at-once 0 must be at least 1"),
        ([*SHORT, "--over", "seed=0..1", "--random", "0"], "--random 0 must be at least 1"),
        ([*SHORT, "--over", "seed=0..1", "--run-dir", "x"], "use --sweep-dir for the directory of the sweep"),
        ([*SHORT, "--over", "seed=0..1", "--metric", "speed"], r"'speed'\. Did you mean seconds\? Known: final"),
        ([*SHORT, "--over", "seed=0..1", "--metric", "xyz"], r"unknown metric 'xyz'\. Known: (?!.*Known:)"),
        (["pppo", "CartPole-v1", "--over", "seed=0..1"], "unknown algorithm 'pppo'"),
        (["--resume", "/nonexistent"], "is not a sweep"),
        ([*SHORT, "--over", "anneal-lr=yes,no"], "--anneal-lr yes must be true or false"),
        ([*SHORT, "--over", "seed=0..1", "--trials", "3"], "--trials needs a sampler"),
        ([*SHORT, "--over", "seed=0..1", "--trials", "0"], "--trials 0 must be at least 1"),
        ([*SHORT, "--over", "seed=0..1", "--sampler", "random"], "--sampler random needs the number of trials"),
        ([*SHORT, "--over", "seed=0..1", "--sampler", "tpee"], "unknown sampler 'tpee'. Did you mean tpe"),
        ([*SHORT, "--over", "seed=0..1", "--sampler", "grid", "--random", "2"], "leave one of them out"),
        ([*SHORT, "--over", "seed=0..1", "--random", "2", "--trials", "2"], "leave one of them out"),
        (
            [*SHORT, "--over", "seed=0..1", "--random", "3"],
            "--random 3 is more than the 2 combinations of these axes",
        ),
        (
            [*SHORT, "--over", "seed=0..1", "--seed", "3"],
            "--seed is given for all trials and also varied",
        ),
        (["ppo", "CartPoel-v1", "--over", "seed=0..1"], r"trial 0 \(seed=0\): unknown environment 'CartPoel-v1'"),
        ([*SHORT, "--over", "environment=CartPole-v1,Foo-v0"], r"trial 1 .*unknown environment 'Foo-v0'"),
        ([*SHORT, "--over", "distribution=central,foo"], r"trial 1 .*unknown distribution policy 'foo'"),
        ([*SHORT, "--over", "seed=0..1", "--import", "nowhere_at_all"], "cannot import 'nowhere_at_all'"),
        ([*SHORT, "--over", "distribution=nowhere:mine"], "cannot import 'nowhere'"),
        (
            [*SHORT, "--over", "seed=0..1", "--gpu-sharing", "mps"],
            "--gpu-sharing mps has no effect, because JAX uses no GPU",
        ),
        (
            [*SHORT, "--over", "seed=0..1", "--memory-fraction", "0.2"],
            "--memory-fraction has no effect, because the trials",
        ),
        ([*SHORT, "--over", "seed=0..1", "--network", "nope"], "unknown network 'nope'"),
        (["ppo", "gymnasium:nowhere.envs:X-v0", "--over", "seed=0..1"], "cannot import 'nowhere.envs'"),
        ([*SHORT, "--over", "seed=0..1", "--all"], "--all applies only to --resume SWEEP"),
        (
            [*SHORT, "--over", "gamma=0.9,0.99", "--group-seeds"],
            "needs consecutive seeds, such as --over seed=0..4",
        ),
        ([*SHORT, "--over", "seed=0,2", "--group-seeds"], "needs consecutive seeds, such as --over seed=0..4"),
        ([*SHORT, "--over", "seed=0..1", "--group-seeds", "--num-seeds", "2"], "leave --num-seeds out"),
        (
            [*SHORT, "--over", "seed=0..1", "--num-seeds", "2"],
            r"1 \(seed=1\) would both train seed 1",
        ),
        ([*SHORT, "--over", "seed=5,3,8", "--num-seeds", "3"], "would both train seed 5, which would count twice"),
        ([*SHORT, "--over", "seed=0..1", "--over", "num-seeds=1,2"], "would both train seed 1"),
        ([*SHORT, "--over", "seed=7,07"], "--over seed: 7, 7 is empty or contains a repeated value"),
        (
            [*SHORT, "--over", "seed=0..1", "--group-seeds", "--fusion", "full"],
            "kernels with --fusion full support only one seed",
        ),
        ([*SHORT, "--over", "quiet=true,false"], "--over quiet has no effect, because it only changes what a run"),
        ([*SHORT, "--over", "seed=0,1", "--over", "dashboard=true,false"], "--over dashboard has no effect"),
        ([*SHORT, "--over", "run-dir=a,b"], "--run-dir has no effect, because each trial has a run of its own"),
        ([*SHORT, "--over", "resume-if-exists=true"], "--resume-if-exists applies to a single run"),
        ([*SHORT, "--over", "seed=0..1", "--stop-early", "median"], "unknown way to stop early 'median'"),
        ([*SHORT, "--over", "seed=0..1", "--grace-steps", "5"], "have no effect without --stop-early asha"),
        ([*SHORT, "--over", "seed=0..1", *ASHA, "--grace-steps", "0"], "--grace-steps 0 must be at least 1"),
        ([*SHORT, "--over", "seed=0..1", *ASHA, "--grace-steps", "128"], "less than the 128 steps of a trial"),
        ([*SHORT, "--over", "seed=0..1", *ASHA, "--reduction-factor", "1"], "-factor 1 must be at least 2"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(words, message, tmp_path, monkeypatch):
    from rollmill.cli import sweep as command
    from rollmill.core.errors import UsageError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        command.run(words)
    assert not list(tmp_path.iterdir())


def test_modules_of_the_user_are_found_but_not_imported(tmp_path, monkeypatch):
    from rollmill.sweeps import creation as sweep_creation
    from rollmill.training.request import TrainingRequest

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "computes").mkdir()
    (tmp_path / "computes/__init__.py").write_text("raise RuntimeError('it was imported')")
    request = TrainingRequest("ppo", "CartPole-v1", imports=("computes.inside",))
    asked = sweep_creation.NewSweep(request, (sweep_creation.Axis("seed", (0, 1)),))
    assert len(sweep_creation.create_sweep(asked).trials()) == 2
    named = sweep_creation.replace(asked, request=request.changed({"distribution": "foo"}))
    with raises("distribution-cannot-be-imported", "unknown", "policy 'foo'"):
        sweep_creation.create_sweep(named)


def test_a_sweep_ends_with_commands_for_its_best_trial(tmp_path, monkeypatch, capsys):
    from rollmill.cli import sweep as command
    from rollmill.sweeps.directory import SweepDirectory
    from rollmill.sweeps.halving import HalvingRule
    from rollmill.sweeps.search_space import listed_axis
    from rollmill.sweeps.spec import SweepSpec
    from rollmill.training.request import TrainingRequest

    monkeypatch.chdir(tmp_path)
    axes = (listed_axis("learning-rate", [1e-3, 1e-2]), listed_axis("seed", [0, 4]))
    points = tuple((rate, seed) for rate in (1e-3, 1e-2) for seed in (0, 4))
    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1"), axes, 4, points, early_stopping=HalvingRule(100, 3))
    made = SweepDirectory.create(Path("rates"), spec)
    monkeypatch.setattr(command, "run_sweep", lambda sweep, **how: 0)
    assert command.run(["--resume", "rates"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report: rates/report.html", "no trial has a result"
    for trial, final in zip(made.trials(), (10.0, 10.0, 20.0, 30.0), strict=True):
        recorded(made.run(trial).root, num_seeds=1, summary={"status": "finished", "final_return": final})
    assert command.run(["--resume", "rates"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:6] == ["trial", "learning-rate", "seed", "status", "final_return", "env_steps"]
    assert printed[-3:] == [
        "report: rates/report.html",
        "evaluate the best trial: rollmill evaluate rates/trials/3",
        "train its options with another seed: rollmill train --config rates/trials/3/config.json --seed 5",
    ]


def test_a_file_of_options_holds_for_all_trials(tmp_path, monkeypatch):
    from rollmill.cli import sweep as command

    made = []
    monkeypatch.setattr(command, "run_sweep", lambda sweep, **how: made.append(sweep) or 0)
    monkeypatch.setattr(command, "_print_table", lambda sweep, metric: None)
    monkeypatch.setattr(command, "_print_best", lambda sweep, metric: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.toml").write_text('environment = "CartPole-v1"\nnum-envs = 4')
    axes = ["--over", "seed=0..1", "--over", "network.hidden-sizes=4 4,16"]
    command.run(["ppo", "--config", "options.toml", *axes])
    requests = [trial.request for trial in made[0].trials()]
    assert [request.settings["network.hidden_sizes"] for request in requests] == [(4, 4), (16,)] * 2
    assert all(request.settings["num_envs"] == 4 for request in requests)


@pytest.mark.parametrize(("slots", "cores"), [(1, 4), (2, 4), (3, 4), (4, 4), (8, 4)])
def test_trials_share_the_cores(slots, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10, 10 + cores)))
    shares = [share_of_cores(slot, slots) for slot in range(slots)]
    assert all(shares) and {core for share in shares for core in share} == set(range(10, 10 + cores))
    if slots <= cores:
        assert sum(map(len, shares)) == cores


@pytest.mark.slow
def test_a_failed_trial_does_not_stop_the_others(tmp_path):
    """The second environment does not exist, which only its training finds out."""
    words = [*SHORT, "--over", "environment=CartPole-v1,gymnasium:Nothing-v0", "--over", "learning-rate=1e-3"]
    done = subprocess.run(sweep(*words, "--sweep-dir", tmp_path / "sweep"), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert (
        "trial 1 (environment=gymnasium:Nothing-v0, learning-rate=0.001) failed with exit code 2: rollmill:"
        in done.stdout
    )
    first, second = table(tmp_path / "sweep")
    assert (first["trial"], first["status"], first["env_steps"]) == ("0", "finished", "128")
    assert (second["trial"], second["status"], second["final_return"]) == ("1", "failed", "")
    summary = json.loads((tmp_path / "sweep/trials/0/summary.json").read_text())
    assert summary["status"] == "finished"
    again = subprocess.run(sweep(*words, "--sweep-dir", tmp_path / "sweep"), capture_output=True, text=True)
    assert again.returncode == 2 and "already contains a sweep. hint: `rollmill sweep --resume" in again.stderr


def test_a_sampler_needs_optuna(tmp_path, monkeypatch):
    from rollmill.cli import sweep as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises("samplers-need-optuna-is-not", "pip install"):
        command.run([*SHORT, "--over", "gamma=0.9..0.99", "--sampler", "tpe", "--trials", "2"])
    assert not list(tmp_path.iterdir())


def test_what_a_sampler_could_propose_is_checked_before_anything_starts(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from rollmill.cli import sweep as command
    from rollmill.core.errors import UsageError

    monkeypatch.chdir(tmp_path)
    for axes, message in [
        (["gamma=0.9..1.1"], "gamma=1.1"),
        (["gamma=0.9..0.99", "network.torso=mlp,gru,xyz"], "unknown --network.torso 'xyz'"),
        (["seed=0..1"], "--trials 3 is more than the 2 combinations of these axes"),
        (["seed=0..999", "update-epochs=1..999"], "999,000 combinations, more than the limit of 100,000"),
    ]:
        words = [word for axis in axes for word in ("--over", axis)]
        with pytest.raises(UsageError, match=message):
            command.run([*SHORT, *words, "--sampler", "tpe", "--trials", "3"])
    assert not list(tmp_path.iterdir())


def test_a_sweep_that_goes_on_has_its_options_already(tmp_path):
    from rollmill.cli import sweep as command
    from rollmill.sweeps.directory import SweepDirectory
    from rollmill.sweeps.search_space import listed_axis
    from rollmill.sweeps.spec import SweepSpec
    from rollmill.training.request import TrainingRequest

    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1"), (listed_axis("seed", [1]),), 1, ((1,),))
    resume = ["--resume", str(SweepDirectory.create(tmp_path / "sweep", spec).root)]
    for more in (["--group-seeds"], ["--grace-steps", "5"], ["--trials", "2"], ["--learning-rate", "1"], *[ASHA]):
        with raises("resume-goes-on-with-trials"):
            command.run([*resume, *more])
    with raises("all-no-trial-is-stopped"):
        command.run([*resume, "--all"])


def test_modules_of_a_strangers_sweep_are_named_again(tmp_path, monkeypatch):
    from rollmill.cli import sweep as command
    from rollmill.sweeps.directory import SweepDirectory
    from rollmill.sweeps.search_space import listed_axis
    from rollmill.sweeps.spec import SweepSpec
    from rollmill.training.request import TrainingRequest

    axes = (
        listed_axis("environment", ["gymnasium:module_a:Env-v0"]),
        listed_axis("distribution", ["module_b:policy"]),
    )
    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1", imports=("module_c",)), axes, 2, sampler="tpe")
    folder = SweepDirectory.create(tmp_path / "sweep", spec).root
    with raises("trials-import-if-you-trust", "module_a, module_b, module_c"):
        command.run(["--resume", str(folder)])
    named = [word for module in ("module_a", "module_c") for word in ("--import", module)]
    with raises("trials-import-if-you-trust", "module_b"):
        command.run(["--resume", str(folder), *named])


def test_the_store_of_a_strangers_sweep_is_not_asked(tmp_path, monkeypatch):
    from rollmill.cli import sweep as command
    from rollmill.sweeps.directory import SweepDirectory
    from rollmill.sweeps.search_space import listed_axis
    from rollmill.sweeps.spec import SweepSpec
    from rollmill.training.request import TrainingRequest

    request = TrainingRequest("ppo", "CartPole-v1", {"start_from": "s3://stranger/run"})
    spec = SweepSpec(request, (listed_axis("seed", [1]),), 1, ((1,),))
    folder = SweepDirectory.create(tmp_path / "sweep", spec).root
    started = []
    monkeypatch.setattr(command, "run_sweep", lambda sweep, **how: started.append(sweep) or 0)
    with raises("was-not-made-here-and-trials-use", "start_from=s3://stranger/run"):
        command.run(["--resume", str(folder)])
    assert not started
    command.run(["--resume", str(folder), "--trust"])
    command.run(["--resume", str(folder)])
    assert len(started) == 2


@pytest.mark.slow
def test_trials_are_stopped_early_and_go_on_if_asked(tmp_path):
    """The second trial learns nothing, so at the latest rung it is worse than the first, which has ended."""
    words = ["ppo", "CartPole-v1", "--num-envs", "32", "--num-steps", "32", "--total-timesteps", "1000000"]
    words += ["--over", "learning-rate=2.5e-3,1e-9", "--at-once", "1", "--sweep-dir", tmp_path / "sweep"]
    how = [*ASHA, "--reduction-factor", "2", "--grace-steps", "65536"]
    done = subprocess.run(sweep(*words, *how), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "trial 1 (learning-rate=1e-09) was stopped early at 65,536 steps, where its return of" in done.stdout
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["finished", "stopped early"]
    run = tmp_path / "sweep/trials/1"
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped" and checkpoints(run)[-1] > 0
    before = checkpoints(run)[-1]
    again = subprocess.run(sweep("--resume", tmp_path / "sweep"), capture_output=True, text=True)
    assert again.returncode == 0 and "started" not in again.stdout and checkpoints(run)[-1] == before
    on = subprocess.run(sweep("--resume", tmp_path / "sweep", "--all"), capture_output=True, text=True)
    assert on.returncode == 0, on.stderr
    assert "2 trials, 1 of them ended" in on.stdout
    assert {row["status"] for row in table(tmp_path / "sweep")} == {"finished"}


@pytest.mark.slow
def test_a_sampler_goes_on_with_its_proposals_after_a_kill(tmp_path):
    pytest.importorskip("optuna")
    folder = tmp_path / "sweep"
    words = [*SHORT, "--over", "learning-rate=log:1e-5..1e-2", "--sampler", "tpe", "--trials", "3"]
    first = subprocess.Popen(sweep(*words, "--at-once", "2", "--sweep-dir", folder), stdout=subprocess.DEVNULL)
    wait_until(lambda: all((folder / f"trials/{name}.log").exists() for name in "01"), first)
    first.kill()
    first.wait()
    proposed = json.loads((folder / "proposals.json").read_text())["points"]
    assert len(proposed) == 2
    second = subprocess.run(sweep("--resume", folder), capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    points = json.loads((folder / "proposals.json").read_text())["points"]
    assert points[:2] == proposed and len({rate for (rate,) in points}) == 3
    rows = {row["trial"]: row for row in table(folder)}
    assert [float(rows[name]["learning-rate"]) for name in "012"] == [rate for (rate,) in points]
    assert {row["status"] for row in rows.values()} == {"finished"}


@pytest.mark.slow
def test_killed_sweeps_and_trials_lose_nothing(tmp_path):
    folder = tmp_path / "sweep"
    runs = [folder / "trials" / name for name in "01"]
    first = subprocess.Popen(sweep(*LONG, "--over", "seed=0..1", "--sweep-dir", folder), stdout=subprocess.PIPE)
    wait_until(lambda: all(len(checkpoints(run)) > 1 for run in runs), first)
    killed, before = trial_process(runs[0]), checkpoints(runs[0])[-1]
    assert killed is not None
    assert Path(f"/proc/{killed}/comm").read_text() == "rollmill 0\n"
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: trial_process(runs[0]) not in (None, killed) and checkpoints(runs[0])[-1] > before, first)
    second = subprocess.run(sweep("--resume", folder), capture_output=True, text=True)
    assert second.returncode == 2 and "is writing to" in second.stderr
    first.kill()
    printed = first.communicate()[0].decode()
    assert "was ended by SIGKILL. It is being resumed" in printed
    deadline = time.monotonic() + 60
    while any(trial_process(run) for run in runs):  # they stop with a checkpoint when their sweep is gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(json.loads((run / "summary.json").read_text())["status"] == "stopped" for run in runs)
    before = [checkpoints(run)[-1] for run in runs]
    third = subprocess.Popen(sweep("--resume", folder), stdout=subprocess.DEVNULL)
    wait_until(lambda: all(checkpoints(run)[-1] > last for run, last in zip(runs, before, strict=True)), third)
    third.send_signal(signal.SIGTERM)
    assert third.wait(timeout=60) == 143
    assert [row["status"] for row in table(folder)] == ["stopped", "stopped"]
    assert not any(trial_process(run) for run in runs)


@pytest.mark.parametrize(
    "words",
    [
        ["--over", "seed=0,2,4", "--num-seeds", "2"],
        ["--over", "num-seeds=1,2"],
        ["--over", "seed=0..1", "--over", "gamma=0.9,0.99"],
        ["--over", "seed=0..2", "--group-seeds"],
    ],
)
def test_seeds_that_are_apart_are_taken(words, tmp_path):
    from rollmill.cli.requests import parse_training
    from rollmill.sweeps.creation import NewSweep, create_sweep, typed_axis
    from rollmill.sweeps.search_space import parse_axis

    axes = tuple(typed_axis("ppo", parse_axis(text)) for text in words[1::2] if "=" in text)
    request = parse_training([*SHORT, *(words[2:] if "--num-seeds" in words else ())]).request
    create_sweep(NewSweep(request, axes, directory=tmp_path / "sweep"))
