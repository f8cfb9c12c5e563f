"""The pages of profiles: small, self-contained, escaped, and with the figures of the profile."""

import re
from dataclasses import replace

import numpy as np
import pytest

from profiling.by_hand import OPERATIONS, process, profile, timeline
from profiling.pages import ReadPage
from rollmill.profiler.advice import with_advice
from rollmill.profiler.report.comparison import compare, comparison_page
from rollmill.profiler.report.html import profile_page
from rollmill.profiler.report.roofline import attainable, points_of
from rollmill.profiler.report.timeline import merge_spans
from rollmill.profiling.breakdown import WholeTime
from rollmill.profiling.results import (
    Advice,
    BookKeeping,
    Ceilings,
    DeviceActivity,
    HostTime,
    MemoryUse,
    OperationTime,
    TimelineSpan,
)

LARGEST = 300_000
HOSTILE = '<b>"x'


def test_the_page_shows_the_figures():
    page = ReadPage(profile_page(with_advice(profile())))
    titles = page.texts["h2"]
    assert len(titles) == len(set(titles)) == 11
    explained = [text for text in page.texts["section"] if len(text) > 60]
    assert len(explained) >= 10
    cells = page.texts["td"]
    start = cells.index("gradients")
    assert cells[start : start + 7] == ["gradients", "43.2 %", "20.7", "18.6", "1.20", "2.10", "900"]
    values = page.texts["div"]
    assert "27.7 ms · 57.8 %" in values and "2.90 ms · 6.1 %" in values and "3,206" in values
    assert any("--fusion full" in code for code in page.texts["code"])
    assert page.texts["b"][:3] == ["1.39 M", "47.2 ms", "63.5 %"]
    assert any("slowed training by 3.10×" in text for text in page.texts["p"])


def test_bars_are_as_long_as_their_figures():
    text = profile_page(profile())
    page = ReadPage(text)
    widths = [float(found) for found in re.findall(r"width:([\d.]+)%", text)]
    expected = [seconds / 0.0277 * 100 for seconds in (0.0225, 0.0012, 0.0040)]
    assert widths[:3] == pytest.approx(expected, abs=0.01)
    assert page.of("i")


def test_a_page_loads_nothing():
    for text in (profile_page(with_advice(profile())), comparison_page(compare(profile(), profile()))):
        page = ReadPage(text)
        assert page.loaded == [] and not {"link", "img", "iframe", "object"} & set(page.tags)
        assert "http" not in text.replace("http-equiv", "") and "url(" not in text and "@import" not in text
        policy = next(meta["content"] for meta in page.of("meta") if "http-equiv" in meta)
        assert policy.startswith("default-src 'none';")


def test_names_are_escaped_everywhere():
    named = profile(
        training={"algorithm": HOSTILE, "environment": HOSTILE, "command": HOSTILE, "placement": HOSTILE},
        operations=(OperationTime((HOSTILE, HOSTILE), 0.01, 0.02, 3.0, 0.001, 1e9, 1e9),),
        processes=[
            process(
                HOSTILE,
                host=(HostTime(HOSTILE, "python", 0.01),),
                transitions={HOSTILE: 3.0},
                timeline=(TimelineSpan(HOSTILE, HOSTILE, 0.0, 0.01),),
            )
        ],
        book_keeping=(BookKeeping(HOSTILE, 1.0, 1.0),),
        memory=(MemoryUse(HOSTILE, 1, 1, 1),),
        devices=(DeviceActivity(HOSTILE, 0.9, None, 0.8),),
        advice=(Advice(HOSTILE, HOSTILE, HOSTILE, 0.1),),
        notes=(HOSTILE, "\x00\x1b"),
    )
    for text in (profile_page(named), comparison_page(compare(named, named))):
        assert HOSTILE not in text and "\x1b" not in text and "\x00" not in text
        page = ReadPage(text)
        assert "x" not in page.tags and all(set(attributes) <= KNOWN for _, attributes in page.attributes)
    assert profile_page(named).count("&lt;b&gt;&quot;x") > 25


KNOWN = {
    *(
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "style",
        "title",
        "role",
        "aria-label",
        "d",
        "r",
    ),
    *("viewbox", "preserveaspectratio", "height", "data-units", "data-seconds", "x", "y", "x1", "x2", "y1", "y2"),
    *("cx", "cy", "text-anchor", "pointer-events"),
}


def test_64_long_timelines_are_small_and_say_what_is_left_out():
    spans = timeline(spans=2000)
    many = [process(f"actor/{index}", timeline=spans) for index in range(60)]
    many += [process(f"learner/{index}", timeline=spans) for index in range(4)]
    text = profile_page(with_advice(profile(processes=many)))
    assert len(text.encode()) < LARGEST
    page = ReadPage(text)
    assert "112 more lanes are in the trace for Perfetto." in page.texts["p"]
    assert {"actor/0", "learner/3"} <= set(page.texts["div"])


def test_no_profile_makes_a_large_page():
    """Everything as numerous and as long as can be."""
    names = [f"{index} {'long name ' * 9}" for index in range(100)]
    spans = tuple(
        TimelineSpan(names[index % 8], names[(index // 8) % 17], index * 1e-5, (index + 7.5) * 1e-5)
        for index in range(2000)
    )
    host = tuple(HostTime(name, "python", 0.001) for name in names)
    worst = process(host=host, timeline=spans, transitions=dict.fromkeys(names, 1.5))
    made = profile(
        processes=[replace(worst, name=name) for name in names],
        operations=tuple(
            OperationTime((name, other), 1e-3, 1e-3, 1.0, 1e-4, 1e9, 1e9)
            for name in names[:20]
            for other in names[:50]
        ),
        book_keeping=tuple(BookKeeping(name, 1.0, 1.0) for name in names),
        memory=tuple(MemoryUse(name, 1, 1, 1) for name in names),
        devices=tuple(DeviceActivity(name, 0.9, 0.1, 0.8) for name in names),
        advice=tuple(Advice(name, name, name, 0.1) for name in names[:10]),
        notes=tuple(names),
    )
    assert len(profile_page(made).encode()) < LARGEST
    assert len(comparison_page(compare(made, made)).encode()) < LARGEST


def test_a_profile_without_what_may_be_missing_makes_a_page():
    bare = profile(devices=(), memory=(), book_keeping=(), notes=(), ceilings=None, operations=())
    bare = replace(bare, processes=(), iteration=replace(bare.iteration, unprofiled=0.0, corrected=0.0))
    page = ReadPage(profile_page(bare))
    assert any("No rule applies" in text for text in page.texts["p"]) and "script" not in page.tags


def test_merged_spans_keep_what_takes_longest():
    spans = tuple(
        TimelineSpan("l", "ab"[index % 2], index * 1.0, index + (0.9, 0.3)[index % 2]) for index in range(1000)
    )
    assert merge_spans(spans[:10], 1000.0, 10) == spans[:10]
    merged = merge_spans(spans, 1000.0, 50)
    assert [(one.name, one.start, one.end) for one in merged] == [("a", 0.0, 1000.0)]
    gap = tuple(one for one in spans if not 400 <= one.start < 600)
    assert [(one.start, one.end) for one in merge_spans(gap, 1000.0, 50)] == [(0.0, 400.0), (600.0, 1000.0)]
    assert 400 < len(merge_spans(spans, 1000.0, 999)) <= 999


def test_paths_hold_the_spans_of_the_timeline():
    spans = (
        TimelineSpan("host", "step", 0.0, 0.25),
        TimelineSpan("host", "wait", 0.5, 1.0),
        TimelineSpan("host", "step", 0.25, 0.5),
        TimelineSpan("host", "lost", 0.5, float("inf")),
    )
    page = ReadPage(profile_page(profile(processes=[process(timeline=spans)], memory=())))
    drawn = {name: path["d"] for name, path in zip(page.texts["title"][1:], page.of("path"), strict=False)}
    assert drawn == {"wait": "M10000 5h10000", "step": "M0 5h5000M5000 5h5000"}


def test_the_roofline_is_the_lower_of_two_limits():
    ceilings = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)
    assert [attainable(ceilings, intensity) for intensity in (1.0, 10.0, 50.0)] == [10.0, 100.0, 100.0]
    whole = WholeTime(8.0, idle=0.0, unnamed=0.0)
    operations = [
        OperationTime(("a",), 2.0, 0.0, flops=40.0, bytes=20.0),
        OperationTime(("unknown",), 2.0, 0.0),
        OperationTime(("b",), 4.0, 0.0, flops=4.0, bytes=8.0),
    ]
    points = points_of(operations, whole)
    assert points == [("b", 0.5, 1.0, 0.5), ("a", 2.0, 20.0, 0.25)]


def test_dots_are_under_the_roof_at_their_place():
    text = profile_page(profile())
    page = ReadPage(text)
    dots = [(float(dot["cx"].rstrip("%")), float(dot["cy"])) for dot in page.of("circle")]
    known = sorted((one for one in OPERATIONS if one.flops), key=lambda one: -one.device)
    across = np.polyfit([np.log10(one.flops / one.bytes) for one in known], [x for x, _ in dots], 1)
    upwards = np.polyfit([np.log10(one.flops / one.device) for one in known], [y for _, y in dots], 1)
    assert across[0] > 0 > upwards[0]
    assert text.rindex("<circle") < text.index('class="above"')  # no dot covers the limits
    for one, (x, y) in zip(known, dots, strict=True):
        assert np.polyval(across, np.log10(one.flops / one.bytes)) == pytest.approx(x, abs=0.1)
        assert np.polyval(upwards, np.log10(one.flops / one.device)) == pytest.approx(y, abs=0.5)
