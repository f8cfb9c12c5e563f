"""Returns over steps, of running trainings and thinned."""

import json

import pytest

from rollmill.record.metric_curves import LineFollower, MetricPoint, thinned_curve
from rollmill.record.run_directory import RunDirectory


def line(steps, value, **more):
    return json.dumps({"iteration": steps, "env_steps": steps, "episode/return": value, **more}) + "\n"


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def test_lines_are_read_as_they_come(run):
    follower = LineFollower(run.folder)
    assert follower.read_points() == []  # the run has not begun
    run.metrics_file.write_text(line(1, None) + line(2, 3.5, extra="x") + '{"env_steps": 3, "epis')
    assert follower.read_points() == [MetricPoint(2, 3.5)]
    with run.metrics_file.open("a") as file:
        file.write('ode/return": 4}\n' + "damaged\n" + line(4, 5.0))
    assert follower.read_points() == [MetricPoint(3, 4.0), MetricPoint(4, 5.0)]
    assert follower.read_points() == []


def test_a_replaced_file_is_read_again(run, tmp_path):
    follower = LineFollower(run.folder)
    run.metrics_file.write_text(line(1, 1.0) + line(2, 2.0))
    assert len(follower.read_points()) == 2
    (tmp_path / "new").write_text(line(1, 1.0) + line(2, 2.5) + line(3, 3.0))
    (tmp_path / "new").replace(run.metrics_file)
    assert follower.read_points() == [MetricPoint(1, 1.0), MetricPoint(2, 2.5), MetricPoint(3, 3.0)]


def test_links_are_not_followed(run, tmp_path):
    (tmp_path / "elsewhere").write_text(line(1, 1.0))
    run.metrics_file.symlink_to(tmp_path / "elsewhere")
    assert LineFollower(run.folder).read_points() == [] == thinned_curve(run, 10)


@pytest.mark.parametrize("most", [1, 2, 10, 50])
@pytest.mark.parametrize("lines", [1, 2, 9, 1000])
def test_curves_are_thinned_evenly(run, lines, most):
    run.metrics_file.write_text("".join(line(n, float(n)) for n in range(1, lines + 1)))
    curve = thinned_curve(run, most)
    steps = [point.env_steps for point in curve]
    assert len(curve) <= most and steps[-1] == lines and steps == sorted(set(steps))
    assert all(point.value == point.env_steps for point in curve)
    if most == 50 and lines == 1000:
        assert steps[0] == 1 and max(b - a for a, b in zip(steps, steps[1:], strict=False)) < 50


def test_curves_of_single_seeds(run):
    seeds = {"episode/return_seed4": 1.0, "episode/return_seed5": 3.0}
    run.metrics_file.write_text(line(8, 2.0, **seeds))
    assert thinned_curve(run, 5) == [MetricPoint(8, 2.0)]
    assert thinned_curve(run, 5, seed=5) == [MetricPoint(8, 3.0)] and thinned_curve(run, 5, seed=6) == []


def test_no_curve_without_returns(run):
    assert thinned_curve(run, 10) == []
    run.metrics_file.write_text(line(1, None) + "\n\n")
    assert thinned_curve(run, 10) == []
