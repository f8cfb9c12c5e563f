"""The report of a sweep: one page that loads nothing, small however long the trials were."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from rollmill.pages.charts import ticks
from rollmill.record.metric_curves import MetricPoint
from rollmill.sweeps.analysis import configurations, importances
from rollmill.sweeps.directory import TRIAL_RESULTS, SweepDirectory
from rollmill.sweeps.intervals import bootstrap_interval
from rollmill.sweeps.parallel_coordinates import parallel_coordinates
from rollmill.sweeps.ranking import rank_rows
from rollmill.sweeps.report import LabelledCurve, learning_curves, report, write_report
from rollmill.sweeps.search_space import listed_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.request import TrainingRequest

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Counts elements, and keeps cells and whatever a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.counts, self.loaded, self.cells, self.open = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "line"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def made_sweep(root, trials, lines, option="learning-rate"):
    values = [f"<{n}>" for n in range(trials)]
    request = TrainingRequest("ppo", "CartPole-v1")
    spec = SweepSpec(request, (listed_axis(option, values),), trials, tuple((value,) for value in values))
    sweep = SweepDirectory.create(root, spec)
    for number, trial in enumerate(sweep.trials()):
        run = sweep.run(trial)
        run.root.mkdir()
        steps = [{"env_steps": 1000 * n, "episode/return": number + n / 7} for n in range(1, lines + 1)]
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in steps))
        summary = {"status": "finished", "final_return": float(number), "env_steps": 1000 * lines}
        run.summary_file.write_text(json.dumps(summary))
    return sweep


def lines_of(text):
    """The curves of the first figure of a page."""
    drawn = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    return [path for path in drawn.iter("path") if path.get("class", "").startswith("line")]


def test_a_sweep_of_one_trial_says_so(tmp_path):
    sweep = made_sweep(tmp_path / "sweep", 1, 10)
    write_report(sweep, sweep.rows("final_return"), "final_return")
    assert "ppo on CartPole-v1: 1 trial<" in (sweep.root / "report.html").read_text()


def test_a_report_of_many_long_trials_is_small(tmp_path):
    sweep = made_sweep(tmp_path / "sweep", 200, 2000)
    rows = sweep.rows("final_return")
    write_report(sweep, rows, "final_return")
    text = (sweep.root / "report.html").read_text()
    assert len(text) < 300_000
    page = Page(text)
    assert not page.open and not page.loaded and page.counts["script"] == 1
    assert page.counts["tr"] == 201 and page.cells[:5] == ["199", "<199>", "finished", "199", ""]
    *others, best = lines_of(text)
    assert best.get("class") == "line" and len(others) == 199  # over all others
    assert {line.get("class") for line in others} == {"line faint"}
    assert others[0][0].text == "000 (learning-rate=<0>)" and "199 (learning-rate=&lt;199&gt;)</span>" in text
    for line in (*others, best):
        points = [tuple(map(float, point.split())) for point in line.get("d")[1:].split("L")]
        assert len(points) == 60 and all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_more_trials_than_are_shown(tmp_path):
    sweep = made_sweep(tmp_path / "sweep", 510, 3)
    write_report(sweep, sweep.rows("final_return"), "final_return")
    text = (sweep.root / "report.html").read_text()
    assert "The best 500 of 510 are shown." in text and len(lines_of(text)) == 500


def test_a_sweep_without_any_result(tmp_path):
    sweep = made_sweep(tmp_path / "sweep", 2, 0)
    for trial in sweep.trials():
        sweep.run(trial).summary_file.unlink()
    write_report(sweep, sweep.rows("final_return"), "final_return")
    text = (sweep.root / "report.html").read_text()
    assert "No episode has ended yet." in text and 'class="marked"' not in text
    assert Page(text).cells.count("unfinished") == 2


def test_a_curve_lies_where_its_numbers_are():
    curve = [MetricPoint(0, 0.0), MetricPoint(50, 5.0), MetricPoint(100, 10.0)]
    curves = [LabelledCurve("a", curve), LabelledCurve("b", [MetricPoint(100, float("nan"))])]
    drawn = learning_curves(curves, num_best=0)[1]
    assert [line.get("d") for line in lines_of(drawn)] == ["M0.0 963.0L500.0 500.0L1000.0 37.0"]
    flat = learning_curves([LabelledCurve("a", [MetricPoint(7, 1.0)])], num_best=1)[1]
    assert [line.get("d") for line in lines_of(flat)] == ["M500.0 500.0"]


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 500, [0, 100, 200, 300, 400, 500]),
        (-1600, -150, [-1500, -1000, -500]),
        (0, 40_000_000, [0, 1e7, 2e7, 3e7, 4e7]),
        (3, 3, [3]),
        (0.0, 5e-324, [0]),
        (-1e308, 1e308, [-1e308]),
        (0.11, 0.52, [0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_ticks(low, high, marks):
    assert ticks(float(low), float(high)) == pytest.approx(marks)


def results(*rows):
    return [{"lr": lr, "act": act, "seed": seed, "r": value} for lr, act, seed, value in rows]


OPTIONS = ("lr", "act", "seed")
LUCKY = results(
    *((0.001, "tanh", 0, 90.0), (0.001, "tanh", 1, 80.0), (0.01, "tanh", 0, 100.0), (0.01, "tanh", 1, 20.0)),
    *((0.001, "relu", 0, 91.0), (0.001, "relu", 1, None), (0.01, "relu", 0, 10.0), (0.01, "relu", 1, 14.0)),
)


def test_configurations_are_ranked_by_means_over_their_seeds():
    found = configurations(LUCKY, OPTIONS, "r")
    assert found[0] == ((0.001, "tanh"), 85.0, 80.0, 90.0, 2, 0)  # not the one with the seed of 100
    assert [each.point for each in found[1:]] == [(0.01, "tanh"), (0.01, "relu"), (0.001, "relu")]
    assert found[-1] == ((0.001, "relu"), 91.0, 91.0, 91.0, 1, 1)  # which lacks a seed


def test_intervals_of_many_seeds_are_narrower_than_their_range_and_repeatable():
    values = np.arange(10.0)[:, None]
    low, high = bootstrap_interval(values)
    assert 2.0 < low[0] < 3.5 < 5.5 < high[0] < 7.0
    assert bootstrap_interval(values)[0] == low
    spread = 1.96 * np.std(values) / np.sqrt(10)  # of a mean, for large numbers
    assert high[0] - low[0] == pytest.approx(2 * spread, rel=0.15)


def test_the_option_that_decides_is_the_most_important():
    rows = [
        {"lr": lr, "noise": noise, "seed": seed, "r": 10.0 * lr + 0.1 * ((7 * noise + 3 * seed) % 5)}
        for lr in (1, 2, 3)
        for noise in (0, 1)
        for seed in range(4)
    ]
    shares = {each.option: each.share for each in importances(rows, ("lr", "noise", "seed"), "r")}
    assert list(shares)[0] == "lr" and shares["lr"] > 0.95 and shares["noise"] < 0.02 and shares["seed"] < 0.02
    assert importances(rows[:5], ("lr", "noise", "seed"), "r") == []
    assert importances([{**row, "r": 1.0} for row in rows], ("lr",), "r") == []


def test_numbers_in_a_range_are_binned():
    rows = [{"lr": index / 30, "r": float(index)} for index in range(30)]
    (share,) = importances(rows, ("lr",), "r")
    assert 0.9 < share.share < 1.0


def test_parallel_coordinates_place_values_on_their_axes():
    found = configurations(LUCKY, OPTIONS, "r")
    drawn = ElementTree.fromstring(parallel_coordinates(found, ("lr", "act"), "r"))
    paths = drawn.findall(f"{SVG}path")
    assert [path.get("class") for path in paths] == ["way", "way", "way", "way best"]
    assert paths[-1].get("d") == "M70 296L450 296L830 54" and paths[-1][0].text == "lr=0.001, act=tanh: 85"
    assert {text.text for text in drawn.findall(f"{SVG}text")} >= {"lr", "act", "r", "tanh", "relu", "0.001"}
    assert parallel_coordinates(found[:1], ("lr", "act"), "r") == ""


def test_the_report_has_configurations_coordinates_and_importance():
    others = {"trial": "0", "status": "finished", **dict.fromkeys(TRIAL_RESULTS), "seconds": 12.345678}
    rows = rank_rows([others | row for row in LUCKY], OPTIONS, "r")
    text = report("a", [], rows, options=OPTIONS, metric="r", all_rows=rows)
    page = Page(text)
    assert not page.open and not page.loaded and "80.0 to 90.0" in page.cells and "1 of 2" in page.cells
    assert {"12.3", "2"} <= set(page.cells) and not {"12.345678", "2.00"} & set(page.cells)
    parts = [text.index(part) for part in ("Configurations over", "Parallel", "Importance", ">Trials<")]
    assert parts == sorted(parts)
