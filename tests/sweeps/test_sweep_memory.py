"""Trials that end for want of a GPU's memory, or with a lost GPU: run again, counted and said."""

import contextlib
import subprocess

import pytest
from test_sweep_directory import end, made

from rollmill.core.errors import DeviceLostError, DeviceMemoryError
from rollmill.gpus.machine_parts import MachinePart, MachineParts
from rollmill.sweeps import running as module
from rollmill.sweeps.running import run_sweep

MEMORY, LOST = DeviceMemoryError.exit_code, DeviceLostError.exit_code


class Processes:
    """Trials that end at once; each with the code that is next in its list, and 0 after that."""

    def __init__(self, codes, fits=100, ended_together=0, fit_together=100):
        self.codes, self.fits, self.ended_together = codes, fits, ended_together
        self.fit_together = fit_together
        self.sizes, self.started = [], []

    @contextlib.contextmanager
    def divide(self, wanted, most, sharing, enough=None):
        count = min(wanted or 4, most)
        self.sizes.append(count)
        yield MachineParts([MachinePart((), {}) for _ in range(count)], "on a GPU", least=1)

    def start(self, sweep, trials, part, imports):
        trial = trials[0]
        if len(trials) > 1:
            return self.start_together(sweep, trials)
        self.started.append(trial.name)
        codes = self.codes.get(trial.name, [])
        code = codes.pop(0) if codes else (0 if self.sizes[-1] <= self.fits else MEMORY)
        sweep.log(trial).write_text(f"rollmill: code {code}\n")
        if code == 0:
            end(sweep, trial, "finished", 1.0)
        return Ended(code)

    def start_together(self, sweep, trials):
        """Ends the first trials of a shared program, and fails."""
        self.started.append("+".join(trial.name for trial in trials))
        if len(trials) > self.fit_together:
            sweep.log(trials[0]).write_text("rollmill: no memory\n")
            return Ended(MEMORY)
        sweep.log(trials[0]).write_text("rollmill: a number is not finite\n")
        for trial in trials[: self.ended_together]:
            end(sweep, trial, "finished", 1.0)
        return Ended(0 if self.ended_together == len(trials) else 1)


class Ended(subprocess.Popen):
    """A process that has ended already."""

    def __init__(self, code):
        self.returncode = code

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode

    def terminate(self):
        pass


@pytest.fixture
def sweep_of(monkeypatch, tmp_path):
    def run(processes, trials=6, together="off"):
        monkeypatch.setattr(module, "divide_machine", processes.divide)
        monkeypatch.setattr(module, "start_trials", processes.start)
        said = []
        sweep = made(tmp_path / "sweep", trials=trials)
        code = run_sweep(
            sweep,
            at_once=None,
            sharing="auto",
            metric="final_return",
            say=said.append,
            imports=(),
            together=together,
        )
        return code, said

    return run


def test_a_sweep_of_one_trial_says_so(sweep_of):
    code, said = sweep_of(Processes({}, fits=1), trials=1)
    assert code == 0 and said[0].startswith("1 trial, 0 of them finished; 1 at a time")


def test_trials_without_memory_run_again_with_fewer_beside_them(sweep_of):
    processes = Processes({}, fits=1)
    code, said = sweep_of(processes)
    # Four at a time, then two, then one: all six end twice for want of memory before they are alone.
    assert (code, processes.sizes) == (0, [4, 2, 1])
    assert len(processes.started) == 18
    assert said[-1] == (
        "6 trials ran out of GPU memory, 12 times in total. Next to fewer trials, all of them completed."
    )
    told = [line for line in said if "It runs again later, next to fewer trials: rollmill: code 3" in line]
    assert len(told) == 12


def test_a_trial_that_finds_no_memory_alone_fails_with_its_reason(sweep_of):
    processes = Processes({"1": [MEMORY] * 9})
    code, said = sweep_of(processes, trials=3)
    # With one trial left there is one part: it runs alone the second time.
    assert (code, processes.sizes) == (1, [3, 1])
    assert processes.started.count("1") == 2
    assert any("failed with exit code 3: rollmill: code 3" in line for line in said)
    assert said[-1] == (
        "1 trial ran out of GPU memory, 2 times in total. Next to fewer trials, all but 1 of them completed."
    )


def test_a_lost_gpu_is_known_by_the_exit_code_alone(sweep_of):
    processes = Processes({"0": [LOST, LOST], "2": [1]})
    code, said = sweep_of(processes, trials=3)
    assert code == 1 and processes.started.count("0") == 3 and processes.started.count("2") == 1
    assert sum("was stopped by a GPU error. It is being resumed" in line for line in said) == 2
    assert any("failed with exit code 1" in line for line in said)
    assert not any("memory" in line for line in said)


def test_words_in_a_log_are_no_lost_gpu(sweep_of, monkeypatch):
    processes = Processes({"0": [1]})
    monkeypatch.setattr(module, "last_line", lambda log: "my test of CUDA_ERROR handling failed")
    code, _ = sweep_of(processes, trials=1)
    assert code == 1 and processes.started == ["0"]


def test_trials_of_a_program_that_fails_go_on_alone(sweep_of):
    processes = Processes({}, ended_together=1)
    code, said = sweep_of(processes, trials=6, together="auto")
    # Four parts for six trials: two programs of two, and two trials by themselves.
    assert code == 0
    assert processes.started[:4] == ["0+1", "2+3", "4", "5"]
    assert sorted(processes.started[4:]) == ["1", "3"]
    assert (
        sum(
            "continues in a program of its own, because the shared program ended: rollmill: a number" in s
            for s in said
        )
        == 2
    )


def test_a_program_without_memory_is_divided_into_smaller_ones(sweep_of):
    processes = Processes({}, ended_together=2, fit_together=2)
    code, said = sweep_of(processes, trials=16, together="auto")
    assert code == 0
    sizes = [name.count("+") + 1 for name in processes.started]
    assert sizes == [4] * 4 + [2] * 8
    assert (
        sum("ran out of GPU memory. It runs again in a program of at most 2 trials" in line for line in said) == 16
    )
