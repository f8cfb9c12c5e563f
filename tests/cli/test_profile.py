"""`rollmill profile`: a whole training, its report, and what cannot be profiled."""

import contextlib
import json
import re
import signal
import subprocess
import sys

import jax
import pytest

import rollmill
from profiling.by_hand import profile as profile_by_hand
from rollmill.cli import profile as profile_command
from rollmill.cli.main import main
from rollmill.profiler.profiling import ProfileOptions, ProfilingStopped, profile
from rollmill.profiler.report.terminal import draw_profile
from rollmill.profiling.results import read_profile

from .conftest import SMALL

SHORT = (
    *("--windows", "1", "--unread-windows", "1"),
    *("--window-seconds", "0.1", "--profiled-seconds", "0.02", "--no-tensorboard"),
)
UNFUSED = (*SMALL, "--fusion", "off")


def profile_of(folder):
    return read_profile((folder / "profile.json").read_bytes(), where="profile.json")


def stop():
    raise SystemExit


def exit_code(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, environment_variables):
    folder = tmp_path_factory.mktemp("profile") / "ppo"
    command = [
        sys.executable,
        "-m",
        "rollmill",
        "profile",
        "ppo",
        "CartPole-v1",
        *UNFUSED,
        *SHORT,
        "--output",
        folder,
    ]
    done = subprocess.run(command, env=environment_variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_operations_have_the_names_of_the_graph_and_sum_to_an_iteration(profiled):
    found = profile_of(profiled[0])
    paths = {operation.path for operation in found.operations}
    assert {("collect", "policy"), ("collect", "environment"), ("collect", "environment", "reset")} <= paths
    assert {("learn", "gradients"), ("learn", "update"), ("learn", "prepare")} <= paths
    total = sum(operation.seconds for operation in found.operations)
    overlap = found.processes[0].overlap
    assert total + overlap.neither == pytest.approx(found.iteration.unprofiled, rel=0.05)
    unnamed = sum(operation.seconds for operation in found.operations if operation.path == ("other",))
    assert unnamed < 0.1 * total
    assert found.training.env_steps == 8 * 8 and found.iteration.windows == 1


def test_a_report_is_printed_and_written(profiled):
    folder, done = profiled
    assert re.search(r"gradients\s+[\d.]+ %", done.stdout) and "without it" in " ".join(done.stdout.split())
    assert (folder / "profile.html").read_text().startswith("<!doctype html>")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)


def test_two_profiles_are_compared(profiled, capsys, tmp_path):
    folder, page = profiled[0], tmp_path / "page.html"
    assert exit_code("profile", "compare", folder, folder / "profile.json", "--output", page) == 0
    assert "gradients" in capsys.readouterr().out and page.read_text().startswith("<!doctype html>")


def test_an_iteration_may_be_longer_than_the_steps_by_default(monkeypatch):
    longest = []
    monkeypatch.setattr(
        profile_command, "profile", lambda graph, options, **_: longest.append(graph.loops) or stop()
    )
    with pytest.raises(SystemExit):
        main(["profile", "ppo", "CartPole-v1", "--num-envs", "8192", "--num-steps", "128"])
    assert longest[0].batch_size == 8192 * 128 and longest[0].iterations == profile_command.ITERATIONS


@pytest.mark.slow
def test_workers_are_profiled_in_their_own_processes(rollmill, tmp_path):
    placement = ("--distribution", "single-learner-coarse", "--actors", "2", "--place", "processes")
    done = rollmill("profile", "ppo", "CartPole-v1", *UNFUSED, *SHORT, *placement, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = profile_of(tmp_path / "out")
    assert {process.name for process in found.processes} == {"training", "actor/0", "actor/1", "learner/0"}
    actor = next(process for process in found.processes if process.name == "actor/0")
    assert any(time.category == "waiting" for time in actor.host)
    assert {("collect", "policy"), ("learn", "gradients")} <= {operation.path for operation in found.operations}


@pytest.mark.slow
def test_environments_of_python_are_the_simulator_until_calls_of_compiled_code_are_seen(rollmill, tmp_path):
    done = rollmill(
        *("profile", "ppo", "gymnasium:CartPole-v1", *UNFUSED, *SHORT, "--output", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    found = profile_of(tmp_path / "out")
    steps = {t.category for p in found.processes for t in p.host if t.activity == "collect/environment"}
    assert ("simulator" in steps) == (sys.version_info < (3, 12))
    operations = {one.path: one for one in found.operations}
    assert operations["collect", "environment"].host > 0 and operations["collect", "policy"].device > 0


@pytest.mark.slow
def test_a_training_that_is_too_short_leaves_no_report(rollmill, tmp_path):
    done = rollmill(
        *(
            "profile",
            "ppo",
            "CartPole-v1",
            *UNFUSED,
            *SHORT,
            "--total-timesteps",
            "128",
            "--output",
            tmp_path / "out",
        ),
    )
    assert done.returncode != 0 and "ended before a window was profiled" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("windows", [0, 1])
def test_a_signal_ends_it_with_what_was_seen(rollmill, tmp_path, windows):
    process = rollmill.start(
        *("profile", "ppo", "CartPole-v1", *UNFUSED, "--unread-windows", "0", "--windows", "50"),
        *("--window-seconds", "1", "--output", tmp_path / "out"),
    )
    try:
        for line in process.stderr:
            if line.startswith(f"window {windows + 1} "):
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors
    if windows:
        assert "rollmill: stopped after 1 window, by SIGINT." in errors and "gradients" in output
        assert profile_of(tmp_path / "out").iteration.windows == 1
    else:
        assert "rollmill: stopped before a window was profiled, by SIGINT." in errors
        assert not (tmp_path / "out").exists()


CRASHING = """
import os

import gymnasium
import rollmill

class Crashing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    steps, is_broken = 0, False

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        Crashing.steps += 1
        Crashing.is_broken |= Crashing.steps % 100 == 0 and os.path.exists("break")
        if Crashing.is_broken:
            raise RuntimeError("the simulator broke")
        return self.observation_space.sample(), 0.0, False, False, {}

gymnasium.register("Crashing-v0", Crashing)
"""


@pytest.mark.slow
def test_a_training_that_crashes_leaves_a_report_of_what_was_seen(rollmill, tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING)
    words = ("gymnasium:Crashing-v0", *UNFUSED, *SHORT, "--windows", "500", "--import", "crashing")
    lines = []
    with rollmill.start("profile", "ppo", *words, "--max-failures", "2", "--output", tmp_path / "out") as process:
        for line in process.stderr:  # a line tells of each window
            lines.append(line)
            if line.startswith("window 2 "):
                (tmp_path / "break").touch()
        process.stdout.read()
    errors = "".join(lines)
    assert process.returncode == 1, errors
    assert "rollmill: stopped after " in errors and "the simulator broke" in errors
    found = profile_of(tmp_path / "out")
    assert {process.name for process in found.processes} == {"training", "all/0"}
    assert {("collect", "environment"), ("learn", "gradients")} <= {one.path for one in found.operations}
    assert found.iteration.unprofiled < 0.1, "what a worker takes to begin anew is in no window"
    notes = [note for note in found.notes if "ended with an error" in note]
    assert len(notes) == 1 and "\n" not in notes[0]


@pytest.mark.slow
def test_what_was_measured_is_not_lost_to_an_error_of_any_kind(tmp_path):
    """An error of the framework in the middle of a training."""
    windows = []

    def fail_later(_):
        if len(windows) >= 4:
            raise RuntimeError("the callback broke")

    env = rollmill.make("CartPole-v1")

    def step(key, state, action, params):
        jax.debug.callback(fail_later, action)
        return env.step(key, state, action, params)

    how = ProfileOptions(windows=500, unread_windows=0, window_seconds=0.05, profiled_seconds=0.02)
    graph = rollmill.ppo(env._replace(step=step), num_envs=4, num_steps=8, total_timesteps=2**31)
    with pytest.raises(ProfilingStopped, match="the callback broke") as stopped:
        profile(graph, how=how, show=lambda line: windows.append(line) if line.startswith("window") else None)
    assert stopped.value.exit_code == 1 and stopped.value.profile.iteration.windows >= 1


@pytest.mark.slow
def test_steps_are_those_of_all_seeds_together():
    how = ProfileOptions(windows=1, unread_windows=0, window_seconds=0.05, profiled_seconds=0.02)
    graph = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, total_timesteps=2**24)
    found = profile(graph, rollmill.RunOptions(num_seeds=3), how=how)
    assert found.training.env_steps == 3 * 4 * 8
    assert "96 steps (4 environments × 8 steps × 3 seeds)" in draw_profile(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "full"), "is not empty"),
        (("--output", "full/file/profile"), "cannot be written"),
        (("--output", "x" * 300), "cannot be written"),
        (("--windows", "0"), "windows"),
        (("--window-seconds", "-1"), "window"),
        (("--search-plan",), "--plan FILE"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert exit_code("profile", "ppo", "CartPole-v1", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "left"), [("mine", {"mine"}), ("new/inner/profile", set())])
def test_a_directory_that_was_made_for_nothing_is_removed(given, left, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if left:
        (tmp_path / given).mkdir()
    assert exit_code("profile", "ppo", "NoSuch-v0", "--output", given) == 2
    assert "NoSuch-v0" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_full_disk_is_an_error_after_the_report_was_printed(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"

    @contextlib.contextmanager
    def on_a_full_disk(path):
        with open("/dev/full", "wb", buffering=0) as file:  # a link to it would be replaced
            yield file

    monkeypatch.setattr(profile_command, "profile", lambda *_, **__: profile_by_hand())
    monkeypatch.setattr(profile_command, "open_replacement", on_a_full_disk)
    assert exit_code("profile", "ppo", "CartPole-v1", "--output", output) == 1
    printed = capsys.readouterr()
    assert "gradients" in printed.out and "No space left on device" in printed.err
    assert "Traceback" not in printed.err


def test_what_is_no_profile_is_not_compared(tmp_path, capsys):
    assert exit_code("profile", "compare", tmp_path, tmp_path) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "profile.json").write_text('{"version": 99}')
    assert exit_code("profile", "compare", tmp_path, tmp_path) != 0
    assert "reads version 1" in capsys.readouterr().err
