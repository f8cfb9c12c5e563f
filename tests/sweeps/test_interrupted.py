"""Ctrl-C in Python saves what runs and ends the program's loop, as KeyboardInterrupt does anywhere."""

import os
import signal

import pytest

import rollmill
from rollmill.core.interruption import pass_on_interrupt
from rollmill.hooks import MetricsLogged
from small_ppo import small_ppo


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """Gives SIGINT the handler of a fresh interpreter, whatever ran before in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sends(number):
    def hook(event):
        if isinstance(event, MetricsLogged):
            os.kill(os.getpid(), number)

    return hook


def test_a_loop_over_seeds_ends_and_the_run_can_go_on(tmp_path):
    begun = []
    with pytest.raises(KeyboardInterrupt) as stopped:
        for seed in range(3):
            begun.append(seed)
            options = {"run_dir": tmp_path / str(seed), "seed": seed, "tensorboard": False, "log_every": 1}
            rollmill.train(small_ppo(10_000), hooks=[sends(signal.SIGINT)], quiet=True, **options)
    run = stopped.value.result
    assert begun == [0] and isinstance(stopped.value, rollmill.Interrupted)
    assert run.directory == tmp_path / "0" and run.exit_code == 130 and run.summary["status"] == "stopped"
    done = run.summary["iterations"]
    assert done >= 1 and rollmill.load(run).loaded.iteration == done
    with pytest.raises(rollmill.Interrupted) as again:
        rollmill.resume(run, hooks=[sends(signal.SIGINT)], quiet=True)
    assert again.value.result.summary["iterations"] > done


def test_other_handlers_and_other_signals_return_the_result(tmp_path):
    run = rollmill.Run(tmp_path, {}, 130)
    with pytest.raises(rollmill.Interrupted, match=f"stopped by Ctrl-C; saved in {tmp_path}"):
        pass_on_interrupt(run)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        assert pass_on_interrupt(run) is run
    finally:
        signal.signal(signal.SIGINT, before)
    for code in (0, 1, 143):
        assert pass_on_interrupt(run._replace(exit_code=code)).exit_code == code


def test_a_sweep_in_python(tmp_path, monkeypatch):
    from rollmill.sweeps import call as sweep_call

    monkeypatch.setattr(sweep_call, "run_sweep", lambda *arguments, **options: 130)
    with pytest.raises(rollmill.Interrupted) as stopped:
        rollmill.sweep("ppo", "CartPole-v1", over={"seed": [0, 1]}, sweep_dir=tmp_path / "sweep", quiet=True)
    assert stopped.value.result.directory == tmp_path / "sweep"
    assert [row["status"] for row in stopped.value.result.rows] == ["unfinished"] * 2


def test_the_package_names_its_public_parts_and_no_others():
    names = dir(rollmill)
    assert {"AgentKind", "Interrupted", "serving", "cli", "pages", "pictures"} <= set(names)
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(names)
    assert rollmill.AgentKind("pump", 2, None, None).count == 2
