"""Profiles in a terminal: by value, at any width, whatever names they hold."""

import json
import random
import re
from dataclasses import replace

import pytest

from profiling.by_hand import OVERLAP, process, profile
from rollmill.core.text import compact, number, truncate
from rollmill.profiler.advice import with_advice
from rollmill.profiler.report.comparison import compare, comparison_page, draw_comparison
from rollmill.profiler.report.html import profile_page
from rollmill.profiler.report.perfetto import perfetto_trace
from rollmill.profiler.report.terminal import draw_profile
from rollmill.profiling.breakdown import first_of_each_kind, in_order, operation_tree, whole_time
from rollmill.profiling.results import Advice, OperationTime, WindowDuration, read_profile
from rollmill.profiling.text import duration, milliseconds, percent, signed_percent, size_of
from wordings import raises

HOSTILE = '<b>"x\x1b[31m'


def lines_of(text: str) -> dict[str, list[str]]:
    """Cells of each line by its first one."""
    cells = [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip()]
    return {first: rest for first, *rest in cells}


def test_the_tables_show_the_figures():
    text = draw_profile(with_advice(profile()))
    lines = lines_of(text)
    assert text.startswith(
        "ppo on CartPole-v1: 1.39 M steps/s\n1 NVIDIA H200, 16 cores; one program; fusion off\n"
    )
    said = " ".join(text.split())
    assert (
        "slowed training by 3.10×; corrected 47.9 ms per iteration, without it 47.2 ms, an error of +1.5 %."
        in said
    )
    assert lines["learn"] == ["57.8 %", "27.7", "~23.7", "4.00", "1,270"]
    assert lines["gradients"] == ["43.2 %", "20.7", "~18.6", "2.10", "900"]
    assert lines["policy"] == ["14.8 %", "7.10", "4.00", "3.10", "640"]
    assert lines["(idle: neither host nor device)"] == ["6.1 %", "2.90"]
    assert lines["dispatch"] == ["6.40", "13.4 %", "dispatch"]
    assert lines["training"] == ["47.9", "19.4 %", "44.1 %", "30.5 %", "6.1 %"]
    assert lines["host to device memory"] == ["3,206"] and lines["GPU 0"] == ["97.0 %", "21.0 %", "63.0 %"]
    assert lines["kernel"] == ["3,206", "28,400", "91.1"]
    assert "--fusion full" in text and text.rstrip().endswith("Thunks of a fused loop are counted once.")


def test_operations_follow_those_around_them_the_longest_first():
    nodes = list(in_order(operation_tree(profile().operations)))
    assert [node.name for node in nodes] == [
        *("learn", "gradients", "update", "prepare", "itself"),
        *("collect", "policy", "environment", "itself"),
        "metrics",
    ]
    for whole in (nodes[0], nodes[5]):
        assert sum(each.seconds for each in whole.inside) == pytest.approx(whole.seconds)
        assert sum(each.kernels for each in whole.inside) == pytest.approx(whole.kernels)
    assert nodes[0].seconds == pytest.approx(0.0277) and nodes[0].kernels == 1270
    alone = operation_tree([OperationTime(("a", "b"), 1.0, 2.0), OperationTime(("a", "b", "c"), 4.0, 0.0)])
    assert [(node.path, node.seconds) for node in in_order(alone)] == [
        (("a",), 7.0),
        (("a", "b"), 7.0),
        (("a", "b", "c"), 4.0),
        (("a", "b", "itself"), 3.0),
    ]
    endless = operation_tree([OperationTime(("x",) * 5000, 1.0, 0.0)])
    assert len(list(in_order(endless))) == 16


def test_shares_are_of_all_processes_and_what_no_operation_has_is_said():
    whole = whole_time(profile())
    assert whole.seconds == pytest.approx(0.0479) and whole.idle == pytest.approx(0.0029)
    assert whole.unnamed == pytest.approx(0.0, abs=1e-9)
    two = profile(processes=[process("actor/0"), process("learner/0")])
    whole = whole_time(two)
    assert whole.seconds == pytest.approx(0.0958) and whole.idle == pytest.approx(0.0058)
    assert whole.unnamed == pytest.approx(0.045)
    assert lines_of(draw_profile(two))["(of no operation)"] == ["47.0 %", "45.0"]


def test_the_device_s_time_is_told_by_kind():
    operations = (OperationTime(("learn",), device=0.03, host=0.0, copies=0.01, collectives=0.005),)
    text = draw_profile(profile(operations=operations))
    assert "The device: kernels 31.3 %, copies 20.9 %, collectives 10.4 %, idle 37.4 %." in text


def test_the_process_that_coordinates_workers_has_no_part_in_the_whole_time():
    alone, coordinated = (
        profile(processes=[*coordinator, process("actor/0"), process("learner/0")])
        for coordinator in ([], [process("training")])
    )
    assert whole_time(coordinated) == whole_time(alone)
    lines = lines_of(draw_profile(coordinated))
    assert lines["all 2"] == lines_of(draw_profile(alone))["all 2"] and "training" in lines


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_longer_than_the_terminal(width):
    several = [process(f"{'actor' * 9}/{index}") for index in range(3)]
    text = draw_profile(with_advice(profile(processes=several, notes=("word " * 60,))), width=width)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("count", [1, 4, 64])
def test_80_columns_cut_no_figure(count):
    """Names may end in an ellipsis, figures may not."""
    operations = (OperationTime(("a" * 70, "b" * 70), device=123.4567, host=987.65, kernels=123456.0),)
    several = [process(f"{'actor' * 9}/{index}") for index in range(count)]
    text = draw_profile(profile(processes=several, operations=operations))
    assert "123,457" in text and "987,650" in text and "44.1 %" in text
    assert not re.search(r"\d…", text)


def test_many_processes_are_summed_up():
    many = [process(f"actor/{index}") for index in range(62)] + [process("learner/0"), process("learner/1")]
    text = draw_profile(profile(processes=many))
    lines = lines_of(text)
    assert "16 of 64 processes" in text and "learner/1" in lines and "actor/14" not in lines
    assert lines["all 64"][0] == "3,066" and lines["host to device memory"] == ["205,184"]
    assert [one.name for one in first_of_each_kind(many, 3)] == ["actor/0", "actor/1", "learner/0"]


def test_a_profile_without_what_may_be_missing():
    bare = profile(devices=(), memory=(), book_keeping=(), notes=(), ceilings=None, operations=())
    bare = replace(bare, processes=(), iteration=replace(bare.iteration, unprofiled=0.0, corrected=0.0))
    text = draw_profile(bare)
    assert "steps/s unknown" in text and "not timed without the profiler" in text
    assert "No rule applies" in text


def test_names_cannot_write_to_the_terminal():
    named = profile(
        training={"environment": HOSTILE},
        operations=(OperationTime((HOSTILE,), 0.01, 0.02),),
        processes=[process(HOSTILE, transitions={HOSTILE: 3.0})],
        advice=(Advice(HOSTILE, HOSTILE, HOSTILE, 0.1),),
        notes=(HOSTILE, "[bold]markup[/bold]"),
    )
    text = draw_profile(named)
    assert "\x1b" not in text and text.count('<b>"x') >= 8 and "[bold]markup[/bold]" in text


def test_a_profile_survives_its_file():
    made = with_advice(profile())
    assert read_profile(made.to_json(), where="profile.json") == made
    assert draw_profile(read_profile(made.to_json(), where="profile.json")) == draw_profile(made)


@pytest.mark.parametrize("number", ["inf", 1e30, -1e30])
def test_numbers_that_no_profile_has_are_refused(number):
    document = json.loads(profile().to_json())
    document["operations"][1]["host"] = number
    with raises("is-and-numbers-up-to", "profile.json", "operations.host", "1e+18"):
        read_profile(json.dumps(document), where="profile.json")


def test_overlap_is_of_the_process():
    half = replace(OVERLAP, host_only=0.0, device_only=0.02, both=0.02, neither=0.0)
    lines = lines_of(draw_profile(profile(processes=[process(overlap=half)])))
    assert lines["training"] == ["40.0", "50.0 %", "50.0 %", "0.0 %", "0.0 %"]


def test_numbers_as_text():
    assert [number(value) for value in (0.0, 0.0001234, 0.01234, 1.0, 47.23, 123.4, 65536.0, float("inf"))] == [
        *("0", "1.2e-04", "0.0123", "1.00", "47.2", "123", "65,536", "inf"),
    ]
    assert [duration(value) for value in (2.5, 0.0472, 3.1e-6, 4e-8, 0.0)] == [
        *("2.50 s", "47.2 ms", "3.10 µs", "40.0 ns", "0 ms"),
    ]
    assert [compact(value) for value in (950.0, 1.39e6, 4.9e13, 999_600.0, 999.4)] == [
        *("950", "1.39 M", "49 T", "1 M", "999"),
    ]
    assert [size_of(value) for value in (10, 2048, 3 << 20)] == ["10 B", "2.00 KiB", "3.00 MiB"]
    assert milliseconds(1e-8) == "0" and percent(0.1234) == "12.3 %" and truncate("abcdef", 4) == "abc…"


@pytest.mark.parametrize("seed", range(8))
def test_odd_numbers_make_no_report_fail(seed):
    """A file may hold any numbers: none, negative and endless ones, in any place."""
    draw = random.Random(seed)

    def odd(value):
        if isinstance(value, dict):
            return {name: odd(part) for name, part in value.items()}
        if isinstance(value, list):
            return [odd(part) for part in value if draw.random() > 0.2]
        if isinstance(value, bool) or not isinstance(value, int | float) or draw.random() < 0.7:
            return value
        if isinstance(value, int):
            return draw.choice([0, 1, -3, 10**17])
        return draw.choice([0.0, -value, 1e-300, 1e18])

    document = odd(json.loads(profile(processes=[process("a/0"), process("b/0")]).to_json())) | {"version": 1}
    made = with_advice(read_profile(json.dumps(document), where="profile.json"))
    assert draw_profile(made) and profile_page(made) and json.loads(perfetto_trace(made))
    both = compare(made, profile())
    assert draw_comparison(both) and comparison_page(both)


def test_a_program_without_operations_has_a_report_all_the_same():
    unnamed = with_advice(profile(operations=(OperationTime(("other",), device=0.03, host=0.01),)))
    assert "other" in draw_profile(unnamed, width=100)
    assert profile_page(unnamed).startswith("<!doctype html>") and perfetto_trace(unnamed)
    assert draw_profile(with_advice(profile(operations=())), width=100)


def test_a_correction_that_was_not_tested_has_no_error():
    one = profile(windows=(WindowDuration(2e-3, 1e-3, 10.0),))
    for text in (draw_profile(one), profile_page(one), draw_comparison(compare(one, one))):
        assert "not tested" in text
        assert signed_percent(one.iteration.error) not in text
    assert "not tested" not in draw_profile(profile())


@pytest.mark.parametrize(
    ("corrected", "windows", "options"),
    [
        (0.0510, 15, "--unread-windows 42"),
        (0.0430, 15, "--unread-windows 42"),
        (0.0490, 15, ""),
        (0.0510, 129, ""),
    ],
)
def test_a_large_error_names_the_option_that_lowers_it(corrected, windows, options):
    every = tuple(WindowDuration(2e-3, 1e-3, 10.0, read=number % 5 == 0) for number in range(windows))
    found = profile(windows=every)
    found = replace(found, iteration=replace(found.iteration, corrected=corrected))
    for text in (draw_profile(found), profile_page(found)):
        assert ("--unread-windows" in text) == bool(options)
        assert options in " ".join(text.split())
