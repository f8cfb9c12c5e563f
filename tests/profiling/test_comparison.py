"""Two profiles side by side: matched by path, in a terminal and as a page."""

from dataclasses import replace

import pytest

from profiling.by_hand import OPERATIONS, OVERLAP, process, profile
from profiling.pages import ReadPage
from profiling.test_report_texts import lines_of
from rollmill.profiler.report.comparison import compare, comparison_page, draw_comparison
from rollmill.profiling.results import OperationTime

HALVED = tuple(
    replace(one, device=one.device / 2, host=one.host / 2) for one in OPERATIONS if one.path[-1] != "update"
)
NEW = OperationTime(("rollout kernel",), 0.002, 0.001)


def before_and_after(**changes):
    before = profile()
    after = profile(
        operations=(*HALVED, NEW),
        iteration=replace(before.iteration, unprofiled=0.0236, corrected=0.0240),
        processes=[process(overlap=replace(OVERLAP, host_only=0.0007, device_only=0.0110, neither=0.003))],
        **changes,
    )
    return compare(before, after)


def test_operations_are_matched_by_their_path():
    compared = {one.path: one for one in before_and_after().operations}
    gradients = compared["learn", "gradients"]
    assert (gradients.before, gradients.after) == pytest.approx((0.0207, 0.01035))
    assert gradients.ratio == pytest.approx(0.5)
    assert (gradients.share_before, gradients.share_after) == pytest.approx((0.0207 / 0.0479, 0.01035 / 0.0240))
    gone, new = compared["learn", "update"], compared[NEW.path]
    assert gone.after is None and gone.ratio is None and gone.before == pytest.approx(0.0043)
    assert new.before is None and new.ratio is None and new.after == pytest.approx(0.003)
    assert compared["learn",].after == pytest.approx((0.0277 - 0.0043) / 2)


def test_the_longest_are_first_and_parts_follow_their_whole():
    paths = [one.path for one in before_and_after().operations]
    learning = ["gradients", "update", "prepare", "itself"]
    assert paths[:5] == [("learn",), *(("learn", part) for part in learning)]
    acting = [("collect",), ("collect", "policy"), ("collect", "environment")]
    assert paths[5:] == [*acting, ("collect", "itself"), NEW.path, ("metrics",)]


def test_the_table_shows_both():
    text = draw_comparison(before_and_after(training={"fusion": "full"}))
    lines = lines_of(text)
    assert lines["gradients"] == ["20.7", "10.3", "43.2 %", "43.1 %", "0.500×"]
    assert lines["update"] == ["4.30", "-", "9.0 %", "-", "gone"]
    assert lines["rollout kernel"] == ["-", "3.00", "-", "12.5 %", "new"]
    assert lines["host only"][:2] == ["14.6", "0.700"] and lines["dispatch"][-1] == "1.00×"
    said = " ".join(text.split())
    assert said.endswith("Error of an iteration's whole time: before +1.5 %, after +1.7 %.")
    assert "1.39 M steps/s before, 2.78 M steps/s after: 2.00×." in said
    assert "fusion off" in said and "fusion full" in said
    assert max(map(len, text.splitlines())) <= 80


def test_ratios_are_of_as_many_steps():
    comparison = before_and_after(training={"num_envs": 2048, "env_steps": 131_072})
    assert {one.path: one.ratio for one in comparison.operations}["learn", "gradients"] == pytest.approx(0.25)
    assert comparison.speedup == pytest.approx(4.0)
    assert "ratios are for as many steps" in " ".join(draw_comparison(comparison).split())


def test_what_rounding_leaves_has_no_ratio():
    before = profile(processes=[process(overlap=replace(OVERLAP, neither=9e-19))])
    states = {one.path: one for one in compare(before, profile()).states}
    assert states["neither",].ratio is None and states["host only",].ratio == pytest.approx(1.0)


def test_the_page_shows_both():
    page = ReadPage(comparison_page(before_and_after()))
    assert page.texts["b"][2:5] == ["1.39 M", "2.78 M", "2.00×"]
    cells = page.texts["td"]
    start = cells.index("gradients")
    assert cells[start + 1 : start + 6] == ["20.7", "10.3", "43.2 %", "43.1 %", "0.500×"]
    assert any("4.30 → - ms · gone" in text for text in page.texts["div"])
    assert "script" not in page.tags


def test_profiles_that_were_not_timed_are_compared():
    bare = profile(operations=(), processes=())
    bare = replace(bare, processes=(), iteration=replace(bare.iteration, unprofiled=0.0, corrected=0.0))
    comparison = compare(bare, profile())
    assert comparison.speedup is None and not comparison.states
    assert "steps/s unknown before" in draw_comparison(comparison)
    assert ReadPage(comparison_page(comparison)) and ReadPage(comparison_page(compare(bare, bare)))
