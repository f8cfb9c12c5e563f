"""The table and the report of a sweep while its trials run: when they are written, and what stops them."""

import json

import pytest
from test_sweep_directory import end, made

from rollmill.sweeps import results
from rollmill.sweeps.results import SweepResults
from wordings import raises


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(results, "time", clock)
    return clock


def test_results_are_written_twice_a_minute(tmp_path, clock):
    sweep = made(tmp_path / "sweep")
    found = SweepResults(sweep, "final_return")
    clock.now += 29
    found.write_if_due(())
    assert not (sweep.root / "table.csv").exists()
    clock.now += 1
    end(sweep, sweep.trials()[1], "finished", 7.0)
    found.write_if_due(())
    first, second, *_ = (sweep.root / "table.csv").read_text().splitlines()[1:]
    assert first.startswith("1,") and ",finished,7.0," in first and ",unfinished," in second
    assert (sweep.root / "report.html").exists()
    end(sweep, sweep.trials()[0], "finished", 9.0)
    clock.now += 29
    found.write_if_due(())
    assert ",9.0," not in (sweep.root / "table.csv").read_text()
    clock.now += 1
    found.write_if_due(())
    assert ",9.0," in (sweep.root / "table.csv").read_text()


def test_a_trial_that_runs_again_is_not_the_one_that_was_stopped(tmp_path):
    sweep = made(tmp_path / "sweep")
    first, second, third = sweep.trials()
    end(sweep, first, "stopped", 3.0)
    end(sweep, second, "stopped", 4.0)
    summary = json.loads(sweep.run(second).summary_file.read_text())
    sweep.run(second).summary_file.write_text(json.dumps({**summary, "stop_reason": "return 4 is enough"}))
    status = lambda running: {row["trial"]: row["status"] for row in sweep.rows("final_return", running=running)}
    assert status(()) == {first.name: "stopped", second.name: "finished", third.name: "unfinished"}
    assert status([first.name]) == {first.name: "running", second.name: "finished", third.name: "unfinished"}


def test_results_that_take_long_are_written_rarely(tmp_path, clock, monkeypatch):
    found = SweepResults(made(tmp_path / "sweep"), "final_return")
    clock.now += 30

    def write_for_two_seconds(*_):
        clock.now += 2

    monkeypatch.setattr(results, "write_report", write_for_two_seconds)
    found.write_if_due(())
    assert found.due == clock.now + 200


def test_results_that_cannot_be_written_are_told_at_the_end_alone(tmp_path, clock):
    found = SweepResults(made(tmp_path / "sweep"), "final_return")
    (found.sweep.root / "table.csv").mkdir()
    clock.now += 30
    found.write_if_due(())
    assert not (found.sweep.root / "report.html").exists()
    with raises("result-cannot-be-written", "table.csv"):
        found.write()
