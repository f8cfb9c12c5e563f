"""The command under unusual settings of the terminal and of JAX, and under wrong options."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys

import pytest

from rollmill.core.shell import command
from rollmill.record.run_directory import RunDirectory
from wordings import raises

SETTINGS = {
    "a platform that is none": ({"JAX_PLATFORMS": "foo"}, "JAX cannot start with JAX_PLATFORMS=foo"),
    "a platform that is not here": ({"JAX_PLATFORMS": "tpu"}, "JAX cannot start with JAX_PLATFORMS=tpu"),
    "64 bits": ({"JAX_ENABLE_X64": "1"}, "JAX is set to 64 bits"),
    "no compilation": ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT is set"),
}
OPTIONS = {
    "--lr": "--learning-rate",
    "--n-envs": "--num-envs",
    "--n_steps": "--num-steps",
    "--clip-range": "--clip-coef",
    "--log-dir": "--run-dir",
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow_beyond(1)
def test_settings_of_jax_that_cannot_train_are_named(rollmill, name):
    env, message = SETTINGS[name]
    done = rollmill("train", "ppo", "CartPole-v1", "--total-timesteps", 4096, env=env)
    assert done.returncode == 2 and message in done.stderr and "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_names_a_platform_that_is_none(rollmill):
    done = rollmill("doctor", env={"JAX_PLATFORMS": "foo"})
    assert done.returncode == 2 and "JAX_PLATFORMS=foo" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_the_list(rollmill):
    done = rollmill("list", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "CartPole-v1" in done.stdout and done.stdout.isascii()


def test_a_size_of_minibatches_is_no_number_of_them():
    from rollmill.cli.train import run

    with raises("unknown-option", "num-minibatches is the number of minibatches", ", not their size"):
        getattr(run, "__wrapped__", run)(["ppo", "CartPole-v1", "--batch-size=3"])


@pytest.mark.parametrize("option", OPTIONS)
def test_names_of_other_libraries_lead_to_those_here(option):
    from rollmill.cli.train import run

    with raises("unknown-option-of-command", f"Did you mean {OPTIONS[option]}"):
        getattr(run, "__wrapped__", run)(["ppo", "CartPole-v1", option, "3"])


@pytest.mark.parametrize(("option", "advice"), [("-q", "Did you mean --quiet?"), ("-x", "train ppo --help")])
def test_options_have_no_short_forms(option, advice):
    from rollmill.cli.train import run

    with raises("unknown-option-options-have-no", option, advice):
        getattr(run, "__wrapped__", run)(["ppo", "CartPole-v1", option])


@pytest.mark.parametrize(("name", "meant"), [("PPO", "ppo"), ("Dqn", "dqn"), ("PPOO", "ppo")])
def test_names_of_algorithms_are_found_in_any_case(name, meant):
    from rollmill.cli.train import run

    with raises("unknown-name", f"unknown algorithm {name!r}. Did you mean {meant}"):
        getattr(run, "__wrapped__", run)([name, "CartPole-v1"])


def test_help_is_in_groups_without_marks_of_types(capsys):
    from rollmill.cli.train import run

    with pytest.raises(SystemExit) as ended:
        run(["ppo", "--help-all"])
    text = capsys.readouterr().out
    titles = ["environment:", "algorithm:", "network:", "run:", "recording:", "placement:", "fusion:", "options:"]
    positions = [text.index(f"\n{title}\n") for title in titles]
    assert ended.value.code == 0 and positions == sorted(positions)
    placement = text[positions[5] : positions[6]]
    assert "--distribution TEXT" in placement and "--actors INT" in placement and "--gamma" not in placement
    assert "{None}" not in text and "\x1b" not in text


@pytest.mark.parametrize(("environment", "noted"), [("Acrobot-v1", True), ("CartPole-v1", False)])
def test_a_recipe_for_another_environment_is_noted_and_recorded(monkeypatch, capsys, environment, noted):
    from rollmill.cli import train
    from rollmill.training.request import resolve

    given = []
    monkeypatch.setattr(train, "train_request", given.append)
    monkeypatch.setattr(train, "report", lambda run: 0)
    train.run(["ppo", environment, "--recipe", "cartpole-two-cores"])
    assert ("note: the recipe cartpole-two-cores was tuned for CartPole-v1" in capsys.readouterr().err) == noted
    assert given[0].recipe == "cartpole-two-cores" and resolve(given[0]).config.update_epochs == 8


@pytest.mark.parametrize(
    ("environment", "options", "plies"),
    [
        ("TicTacToe-v0", [], {"random_plies": 5, "fewest_random_plies": 0}),
        ("TicTacToe-v0", ["--env-option", "random_plies=3"], {"random_plies": 3, "fewest_random_plies": 0}),
        ("ConnectFour-v0", [], {}),
    ],
)
def test_a_recipe_has_options_of_its_environment(monkeypatch, environment, options, plies):
    from rollmill.cli import train
    from rollmill.training.request import resolve

    given = []
    monkeypatch.setattr(train, "train_request", given.append)
    monkeypatch.setattr(train, "report", lambda run: 0)
    train.run(["alphazero", environment, "--recipe", "alphazero-tic-tac-toe", *options])
    assert resolve(given[0]).graph().settings["environment_options"] == plies


@pytest.mark.parametrize("module", ["difflib", "jax"])
@pytest.mark.parametrize("entry", [["-m", "rollmill"], ["-c", "from rollmill.__main__ import main; main()"]])
def test_the_command_listens_to_interrupts_while_it_imports(tmp_path, entry, module):
    """Interrupts the process at the import of the first module that takes time, and of JAX.

    A package of that name interrupts the process, and stands for a slow import.
    """
    slow = tmp_path / module
    slow.mkdir()
    (slow / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *entry, "list"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    assert (done.returncode, done.stderr) == (130, "rollmill: interrupted\n")


def test_names_are_imported_when_they_are_first_used():
    code = """
import sys, rollmill, rollmill.cli.main
assert "jax" not in sys.modules
assert all(getattr(rollmill, name) is not None for name in rollmill.__all__)
assert set(rollmill.__all__) <= set(dir(rollmill)) and callable(rollmill.ppo) and callable(rollmill.envs.make)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_error_on_a_terminal_is_plain_text(rollmill):
    terminal, theirs = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        both = {"stdout": theirs, "stderr": theirs, "env": {"TERM": "xterm-256color"}}
        process = rollmill.start("plan", "ppo", "CartPole-v1", "--network.convolutions", "1", **both)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is gone with its last writer
            while text := screen.read(4096):
                shown += text
    process.communicate()
    assert process.returncode == 2 and b"convolutions" in shown
    assert b"\x1b[" not in shown and "╭" not in shown.decode()


def test_printed_commands_can_be_copied(tmp_path):
    assert shlex.split(command("resume", "my run", imports=["a"])) == [
        "rollmill",
        "resume",
        "my run",
        "--import",
        "a",
    ]
    run = RunDirectory.create(tmp_path / "it's a run", config={"imports": ["mine", "yours"]}, versions={})
    words = shlex.split(run.command("resume", "--distribution", "gpu-only"))
    expected = ["rollmill", "resume", str(run.root), "--distribution", "gpu-only"]
    assert words == [*expected, "--import", "mine", "--import", "yours"]
