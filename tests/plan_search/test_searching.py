"""The search, with tables of numbers in place of trainings."""

import re
from dataclasses import dataclass, field

import pytest

from rollmill.plan_search.search.candidate import Candidate
from rollmill.plan_search.search.result_table import Measurement, MemoryEstimate, draw_table
from rollmill.plan_search.search.searching import (
    CannotBeFused,
    CannotRun,
    OutOfTime,
    Point,
    Trials,
    saturation,
    search,
)

MB = 1e6


def one(**fields):
    return Candidate(**{"fusion": "off", **fields})


@dataclass
class Numbers:
    """Trials by tables; a measurement takes ten seconds of the clock."""

    speeds: dict
    memory: dict = field(default_factory=dict)
    """Predicted bytes."""
    taken: dict = field(default_factory=dict)
    """Measured bytes, where they differ."""
    predicted: dict = field(default_factory=dict)
    estimated: dict = field(default_factory=dict)
    programs: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)
    now: float = 0.0
    measured: list = field(default_factory=list)
    bounds: list = field(default_factory=list)

    def measure(self, candidate, bound, seconds):
        self.measured.append(candidate)
        self.bounds.append(bound)
        self.now += 10
        found = self.speeds[candidate]
        if isinstance(found, Exception):
            raise found
        found = found.pop(0) if isinstance(found, list) else found
        early = bound is not None and 1.2 * found < bound
        return Measurement(found, self.taken.get(candidate, self.memory.get(candidate)), early)

    def predict_memory(self, candidate):
        return MemoryEstimate(self.memory.get(candidate), self.programs.get(candidate))

    def find(self, *found, budget=1000.0, **options):
        trials = Trials(
            self.refused.get, self.estimated.get, self.predict_memory, self.predicted.get, self.measure
        )
        table = search(found, trials, budget_seconds=budget, clock=lambda: self.now, **options)
        assert [row.candidate for row in table.rows] == list(found)  # none is left out
        assert all(row.reason for row in table.rows)
        return {row.candidate: row for row in table.rows}, table


A, B, C = one(), one(fusion="full"), Candidate("central", "processes", actors=2)


def test_the_fastest_is_chosen_and_every_row_says_why():
    rows, table = Numbers({A: 100.0, B: 300.0, C: 90.0}, memory={A: 5 * MB, B: 7 * MB}).find(A, B, C)
    assert table.chosen == rows[B]
    assert {c: row.status for c, row in rows.items()} == {A: "slower", B: "chosen", C: "slower"}
    assert rows[B].reason == "3.00 x the next, gpu-only (program) fusion=off"
    assert rows[A].reason == "33% of the chosen plan's speed"
    assert rows[C].reason == "30% of the chosen plan's speed; stopped early, because it could no longer win"
    assert (rows[A].predicted_memory, rows[A].measured_memory, rows[A].measured_speed) == (5 * MB, 5 * MB, 100.0)
    assert table.seconds == 30.0


def test_what_cannot_fit_is_rejected_before_it_runs():
    numbers = Numbers({A: 100.0, B: 300.0}, memory={A: 5 * MB, B: 70 * MB})
    rows, table = numbers.find(A, B, memory_limit=50 * MB)
    assert rows[B].status == "rejected"
    assert rows[B].reason == "needs 70 MB, more than the available 50 MB"
    assert numbers.measured == [A]
    assert table.chosen == rows[A]


def test_what_takes_more_than_was_predicted_is_no_choice():
    rows, table = Numbers({A: 1.0, B: 3.0}, memory={A: 5 * MB, B: 6 * MB}, taken={B: 60 * MB}).find(
        A, B, memory_limit=50 * MB
    )
    assert (rows[B].status, rows[B].reason) == ("rejected", "took 60 MB, more than the available 50 MB")
    assert table.chosen == rows[A]


def test_what_took_too_much_is_not_tried_with_more():
    small, large = one(num_envs=4096), one(num_envs=8192)
    numbers = Numbers({A: 1.0, small: 3.0, large: 5.0}, taken={small: 60 * MB})
    rows, _ = numbers.find(A, small, large, memory_limit=50 * MB)
    assert rows[large].reason.startswith("the same plan with 4,096 environments was rejected: took 60 MB")
    assert large not in numbers.measured


@pytest.mark.parametrize("failure", [CannotRun("it crashed"), OutOfTime()])
def test_what_failed_keeps_what_was_predicted(failure):
    rows, _ = Numbers({A: 1.0, B: failure}, memory={B: 6 * MB}, predicted={B: 7.0}).find(A, B)
    assert (rows[B].predicted_memory, rows[B].predicted_speed) == (6 * MB, 7.0)


def test_what_cannot_run_keeps_its_reason():
    numbers = Numbers({A: CannotRun("no such kernel"), B: 3.0}, refused={C: "3 actors do not divide 8"})
    rows, table = numbers.find(A, B, C)
    assert (rows[A].status, rows[A].reason) == ("rejected", "no such kernel")
    assert (rows[C].status, rows[C].reason) == ("rejected", "3 actors do not divide 8")
    assert table.chosen == rows[B]
    assert rows[B].reason == "the only candidate that could be measured"


def test_without_any_that_runs_there_is_no_choice():
    _, table = Numbers({A: CannotRun("no")}).find(A)
    assert table.chosen is None


def test_the_first_is_measured_and_the_rest_is_left_at_the_end_of_the_budget():
    numbers = Numbers({A: 100.0, B: 300.0, C: OutOfTime()})
    rows, table = numbers.find(A, B, C, budget=0.001)
    assert [rows[each].status for each in (A, B, C)] == ["chosen", "not reached", "not reached"]
    assert not table.is_complete
    rows, table = Numbers({A: 100.0, C: OutOfTime()}).find(A, C, budget=15.0)
    assert (rows[C].status, rows[C].reason) == (
        "not reached",
        "the time budget was used up before its first iterations",
    )


def test_a_bound_is_passed_on_so_that_a_training_that_cannot_win_stops():
    numbers = Numbers({A: 100.0, B: 300.0, C: 200.0})
    numbers.find(A, B, C)
    assert numbers.bounds == [None, 100.0, 300.0]


def test_predictions_that_cannot_win_are_skipped():
    numbers = Numbers({A: 300.0}, estimated={C: 190.0}, predicted={B: 190.0})
    rows, _ = numbers.find(A, B, C)
    assert numbers.measured == [A]
    for each in (B, C):
        assert rows[each].status == "skipped"
        assert rows[each].reason == "predicted 190 steps/s; the best so far is 1.6 x as fast"
    numbers = Numbers({A: 300.0, B: 50.0}, predicted={B: 210.0})  # as much as it may be too low
    numbers.find(A, B)
    assert numbers.measured == [A, B]


def test_the_first_measurement_of_a_kind_corrects_its_predictions():
    narrow, wide = (Candidate("central", "processes", actors=actors) for actors in (1, 2))
    numbers = Numbers(
        {A: 100.0, narrow: 80.0},
        memory={A: MB, narrow: 4 * MB, wide: 6 * MB},
        taken={narrow: 2 * MB},
        estimated={narrow: 160.0, wide: 170.0},
    )
    rows, _ = numbers.find(A, narrow, wide)
    assert rows[wide].status == "skipped"
    assert rows[wide].predicted_speed == pytest.approx(85.0)
    numbers = Numbers(
        {A: 100.0, narrow: 80.0, wide: 150.0},
        memory={A: MB, narrow: 4 * MB, wide: 6 * MB},
        taken={narrow: 2 * MB},
    )
    rows, _ = numbers.find(A, narrow, wide)
    assert rows[wide].predicted_memory == pytest.approx(3 * MB)


def test_a_program_is_measured_once():
    auto, wide = one(fusion="auto"), one(fusion="auto", devices=2)
    numbers = Numbers({A: 100.0, B: 90.0}, programs={A: "plain", B: "fused", auto: "plain"})
    rows, _ = numbers.find(A, B, auto, wide)
    assert (rows[auto].status, rows[auto].reason) == (
        "skipped",
        "the same program as gpu-only (program) fusion=off",
    )
    assert rows[wide].status == "skipped"
    assert auto not in numbers.measured
    assert wide not in numbers.measured


def test_a_branch_ends_where_throughput_saturates_against_memory():
    envs = [one(num_envs=width) for width in (64, 128, 256, 512)]
    numbers = Numbers(
        dict(zip(envs, (100.0, 180.0, 185.0, 900.0), strict=True)),
        memory=dict(zip(envs, (10 * MB, 20 * MB, 40 * MB, 80 * MB), strict=True)),
    )
    rows, table = numbers.find(*envs)
    assert numbers.measured[:3] == envs[:3]
    assert envs[3] not in numbers.measured
    assert rows[envs[3]].reason == (
        "saturated along num_envs: from 128 to 256 throughput changed by +3% for +100% memory"
    )
    assert table.chosen.candidate == envs[2]


def test_a_branch_far_behind_is_not_grown():
    slow, fast = one(num_envs=64), one(num_envs=64, fusion="full")
    wide = one(num_envs=128)
    rows, _ = Numbers({slow: 100.0, fast: 400.0}).find(slow, fast, wide)
    assert rows[wide].status == "skipped"
    assert rows[wide].reason.startswith("dominated: even 2 x the throughput of gpu-only (program) fusion=off")


def test_close_ones_are_measured_once_more_and_the_mean_decides():
    numbers = Numbers({A: [100.0, 120.0], B: [105.0, 95.0], C: 50.0})
    rows, table = numbers.find(A, B, C)
    assert table.chosen.candidate == A
    assert (rows[A].measured_speed, rows[B].measured_speed) == (110.0, 100.0)
    assert "mean of two measurements" in rows[A].reason
    numbers = Numbers({A: [100.0], B: [105.0]})
    rows, table = numbers.find(A, B, budget=20.0)  # which is spent then
    assert table.chosen.candidate == B


@pytest.mark.parametrize(
    ("narrow", "wide", "reason"),
    [
        (Point(1, 100, 10), Point(2, 190, 20), None),
        (Point(1, 100, 10), Point(2, 111, 20), None),
        (Point(1, 100, 10), Point(2, 109, 20), "from 1 to 2 throughput changed by +9% for +100% memory"),
        (Point(1, 100, 10), Point(2, 101, 10), "from 1 to 2 throughput changed by +1%"),
        (Point(1, 100, None), Point(2, 103, None), None),
        (Point(1, 100, 20), Point(2, 103, 10), None),  # less memory and faster
        (Point(1, 100, 20), Point(2, 80, 10), "from 1 to 2 throughput changed by -20% for -50% memory"),
    ],
)
def test_saturation_is_throughput_gained_for_memory_added(narrow, wide, reason):
    assert saturation(Point(*narrow), Point(*wide)) == reason


def test_the_table_shows_all_candidates_the_fastest_first():
    _, table = Numbers({A: 100e3, B: 2.5e6, C: CannotRun("no")}, memory={B: 2e9}).find(A, B, C)
    head, *lines = draw_table(table).splitlines()
    assert re.split("  +", head) == [
        "candidate", "steps/s", "predicted steps/s", "memory", "predicted memory", "status", "reason",
    ]  # fmt: skip
    assert lines[0].split() == [
        "gpu-only", "(program)", "fusion=full", "2.5", "M", "-", "2.00", "GB", "2.00", "GB", "chosen",
        "25.00", "x", "the", "next,", "gpu-only", "(program)", "fusion=off",
    ]  # fmt: skip
    assert lines[2].endswith("rejected  no")


def test_what_failed_with_fewer_environments_is_not_grown():
    off, full = ([one(fusion=depth, num_envs=envs) for envs in (64, 128, 256)] for depth in ("off", "full"))
    refused = CannotRun("no kernel")
    trials = Numbers({off[0]: 100.0, off[1]: 190.0, off[2]: 370.0, full[0]: refused})
    rows, _ = trials.find(off[0], full[0], off[1], full[1], off[2], full[2])
    for wider in full[1:]:
        assert rows[wider].reason == "the same plan with 64 environments was rejected: no kernel"
    assert trials.measured == [off[0], full[0], off[1], off[2]]


def test_what_cannot_be_fused_is_not_tried_on_more_devices_or_less_deeply():
    off, full, wide, rollout, auto = (
        one(), one(fusion="full"), one(fusion="full", devices=2), one(fusion="rollout"), one(fusion="auto")
    )  # fmt: skip
    reason = CannotBeFused("trees are too large", ("full", "rollout"))
    trials = Numbers({off: 100.0, full: reason, auto: 100.0})
    rows, _ = trials.find(off, full, wide, rollout, auto)
    assert rows[full].reason == "trees are too large"
    for other in (wide, rollout):
        assert (rows[other].status, rows[other].reason) == (
            "skipped",
            "cannot be fused, because gpu-only (program) fusion=full",
        )
    assert trials.measured == [off, full, auto, off, auto]
    trials = Numbers({off: 100.0, full: CannotBeFused("no gradients", ("full",)), rollout: 200.0})
    rows, table = trials.find(off, full, wide, rollout)
    assert table.chosen == rows[rollout]


def test_what_was_refused_without_trying_may_run_with_more_environments():
    few, many = one(devices=4, num_envs=2), one(devices=4, num_envs=4)
    trials = Numbers({many: 100.0}, refused={few: "4 devices cannot hold 2 environments"})
    rows, _ = trials.find(few, many)
    assert rows[many].status == "chosen"


def test_what_is_far_too_slow_in_proportion_is_not_grown():
    slow = [one(fusion="full", num_envs=envs) for envs in (64, 128)]
    trials = Numbers({one(num_envs=64): 100.0}, estimated={slow[0]: 10.0})
    rows, _ = trials.find(one(num_envs=64), *slow)
    assert rows[slow[1]].reason.startswith("dominated: even scaled in proportion to 64 environments")
