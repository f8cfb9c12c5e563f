"""Learning curves of runs and sweeps: `rollmill.plot` and `rollmill plot`."""

import json
import re

import numpy as np
import pytest

import rollmill
from recorded_runs import of_opponents, recorded as made
from rollmill.cli.main import main
from rollmill.core.errors import CheckpointError
from rollmill.plotting.groups import SeedCurve, group_curves, labels_of, smooth_values
from rollmill.record.metric_curves import MetricPoint
from rollmill.record.run_directory import RunDirectory
from wordings import raises


def recorded(root, name, returns, *, seed=0, config=(), num_seeds=1, stride=100, **more):
    """A run directory with these returns, one a line; a list of lists has one for each seed."""
    graph = {"algorithm": "ppo", "environment": "CartPole-v1", "environment_options": {}}
    graph["config"] = {"learning_rate": 0.001, "network": {"hidden_sizes": [64, 64]}} | dict(config)
    options = {"seed": seed, "num_seeds": num_seeds, "distribution": "gpu-only", **more}
    run = RunDirectory.create(root / name, config={"graph": graph, "options": options}, versions={})
    lines = []
    for index, value in enumerate(returns, 1):
        line = {"iteration": index, "env_steps": stride * index, "seconds": 0.5 * index}
        if num_seeds > 1:
            line |= {f"episode/return_seed{seed + i}": each for i, each in enumerate(value)}
            value = float(np.mean(value))
        lines.append(line | {"episode/return": value, "losses/total": 1.0, "note": "text"})
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run.root


def test_seeds_of_a_configuration_are_one_group_with_mean_and_range(tmp_path):
    a = recorded(tmp_path, "a", [0.0, 10.0], seed=0)
    b = recorded(tmp_path, "b", [2.0, 30.0], seed=1)
    (group,) = rollmill.plot(a, b).groups
    assert group.label == "ppo on CartPole-v1" and group.runs == ("a", "b")
    assert (group.steps.x[0], group.steps.x[-1]) == (100.0, 200.0)
    assert (group.seconds.x[0], group.seconds.x[-1]) == (0.5, 1.0)
    assert (group.steps.mean[0], group.steps.low[0], group.steps.high[0]) == (1.0, 0.0, 2.0)
    assert (group.steps.mean[-1], group.steps.low[-1], group.steps.high[-1]) == (20.0, 10.0, 30.0)


def test_a_repeated_seed_counts_once(tmp_path, capsys):
    repeated = [recorded(tmp_path, name, [0.0, last]) for name, last in (("a", 2.0), ("b", 4.0))]
    (alone,) = rollmill.plot(*repeated).groups
    assert alone.runs == ("a", "b") and alone.last.tolist() == [3.0]
    assert alone.steps.mean[-1] == alone.steps.low[-1] == alone.steps.high[-1] == 3.0
    seeds = recorded(tmp_path, "c", [[0.0, 0.0], [6.0, 9.0]], seed=0, num_seeds=2)
    (group,) = rollmill.plot(*repeated, seeds).groups
    assert group.last.tolist() == [4.0, 9.0]
    assert (group.steps.mean[-1], group.steps.low[-1], group.steps.high[-1]) == (6.5, 4.0, 9.0)
    with pytest.raises(SystemExit, match="0"):
        main(["plot", *map(str, repeated), str(seeds), "--output", str(tmp_path / "p.html")])
    assert "6.50, 4 runs of 2 seeds from 4.00 to 9.00" in capsys.readouterr().out
    assert "(4 runs of 2 seeds)" in (tmp_path / "p.html").read_text()


def test_a_repetition_that_was_killed_early_does_not_pull_the_mean_of_its_seed(tmp_path):
    complete = recorded(tmp_path, "a", [0.0] * 10 + [100.0] * 90, seed=0)
    killed = recorded(tmp_path, "b", [0.0] * 10, seed=0)
    (group,) = rollmill.plot(complete, killed).groups
    assert group.runs == ("a", "b") and group.last.tolist() == [100.0]
    assert group.steps.mean[0] == 0.0 and group.steps.mean[-1] == group.seconds.mean[-1] == 100.0
    almost = recorded(tmp_path, "c", [0.0] * 10 + [200.0] * 88, seed=0)  # ended after 98 % of the steps
    (group,) = rollmill.plot(complete, almost).groups
    assert group.last.tolist() == [150.0] and group.steps.mean[-1] == 150.0
    other = recorded(tmp_path, "d", [0.0] * 10, seed=1)  # the only run of its seed
    (group,) = rollmill.plot(complete, killed, other).groups
    assert group.last.tolist() == [100.0, 0.0] and group.steps.mean[-1] == 50.0


def test_lines_that_are_out_of_order_are_sorted_by_steps(tmp_path):
    run = RunDirectory.open(recorded(tmp_path, "a", [1.0, 2.0, 3.0, 4.0]))
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    stale = json.dumps({"iteration": 1, "env_steps": 100, "seconds": 9.0, "episode/return": -5.0}) + "\n"
    run.metrics_file.write_text("".join([stale, *lines[2:], *lines[:2]]))
    (group,) = rollmill.plot(run.root).groups
    assert group.last.tolist() == [4.0] and (group.last_steps, group.last_seconds) == (400.0, 2.0)
    assert (group.steps.mean[0], group.steps.mean[-1]) == (1.0, 4.0)
    assert (group.seconds.x[0], group.seconds.x[-1]) == (0.5, 2.0) and group.seconds.mean[-1] == 4.0


def test_seeds_of_one_program_are_curves_of_their_own(tmp_path):
    run = recorded(tmp_path, "a", [[0.0, 4.0], [1.0, 7.0]], seed=3, num_seeds=2)
    (group,) = rollmill.plot(run).groups
    assert group.runs == ("a, seed 3", "a, seed 4") and group.last.tolist() == [1.0, 7.0]


def test_copies_in_a_population_are_not_seeds(tmp_path):
    first, *copies = (recorded(tmp_path, str(trial), [1.0, 3.0 - trial], seed=trial) for trial in range(3))
    for run in copies:
        config = json.loads((run / "config.json").read_text())
        resumed = {"iteration": 1, "before": {}, "after": {}, "source": None}
        config["changes"] = [resumed, resumed | {"source": "0"}]
        (run / "config.json").write_text(json.dumps(config))
    groups = rollmill.plot(first, *copies).groups
    assert [group.runs for group in groups] == [("0",), ("1",), ("2",)]
    assert [group.label for group in groups] == ["copied=none", "copied=0 to 1", "copied=0 to 2"]


def test_runs_with_changed_hyperparameters_are_not_seeds_of_others(tmp_path):
    """A change before the first iteration leaves no trace, and equal changes leave a group."""
    changes = [0, 5, 5, 6]
    runs = [recorded(tmp_path, str(seed), [1.0, 3.0], seed=seed) for seed in range(5)]
    for run, iteration in zip(runs[1:], changes, strict=True):
        config = json.loads((run / "config.json").read_text())
        change = {"iteration": iteration, "before": {"learning_rate": 0.01}, "after": {"learning_rate": 0.001}}
        (run / "config.json").write_text(json.dumps({**config, "changes": [change]}))
    groups = rollmill.plot(*runs).groups
    assert [group.runs for group in groups] == [("0", "1"), ("2", "3"), ("4",)]
    told = "changed=learning_rate 0.01 to 0.001 after iteration"
    assert [group.label for group in groups] == ["changed=none", f"{told} 5", f"{told} 6"]


@pytest.mark.parametrize(
    "option", [{"start_from": "/runs/a"}, {"clone": "a.npz"}, {"pool_from": "/runs/a"}], ids=str
)
def test_runs_with_other_initial_weights_are_not_seeds(tmp_path, option):
    scratch = [recorded(tmp_path, f"scratch{seed}", [1.0, 2.0], seed=seed) for seed in (0, 1)]
    tuned = [recorded(tmp_path, f"tuned{seed}", [5.0, 6.0], seed=seed, **option) for seed in (0, 1)]
    groups = rollmill.plot(*scratch, *tuned).groups
    ((name, value),) = option.items()
    assert [group.label for group in groups] == [f"{name}={value}", f"{name}=none"]
    assert [group.last.tolist() for group in groups] == [[6.0, 6.0], [2.0, 2.0]]


def test_each_kind_of_agents_has_a_curve_by_default(tmp_path, capsys):
    game, other = (made(tmp_path / name, more=of_opponents).root for name in ("game", "other"))
    curves = rollmill.plot(game, other, output=tmp_path / "c.html")
    assert (curves.metric, curves.kinds) == ("returns", ("guard", "thief"))
    assert [(group.label, group.last.tolist()) for group in curves.groups] == [
        ("kind=guard", [0.75, 0.75]),
        ("kind=thief", [-0.75, -0.75]),
    ]
    assert "<h1>Returns of guard, thief, 2 runs</h1>" in (tmp_path / "c.html").read_text()
    with pytest.raises(SystemExit, match="^0$"):
        main(["plot", str(game), "--output", str(tmp_path / "d.html")])
    assert "kind=thief: returns -0.750, after 300 steps" in capsys.readouterr().out
    (named,) = rollmill.plot(game, metric="returns/thief").groups
    assert named.last.tolist() == [-0.75]
    mixed = rollmill.plot(game, recorded(tmp_path, "single", [1.0, 2.0]))
    assert sorted(group.last.tolist() for group in mixed.groups) == [[-0.75], [0.75], [2.0]]


def test_groups_are_named_by_what_differs_and_the_best_comes_first(tmp_path):
    slow = recorded(tmp_path, "slow", [1.0, 2.0])
    fast = recorded(tmp_path, "fast", [1.0, 3.0], config={"learning_rate": 0.01, "flag": True})
    labels = [group.label for group in rollmill.plot(slow, fast).groups]
    assert labels == ["learning_rate=0.01, flag=true", "learning_rate=0.001, flag=none"]


def test_algorithms_that_differ_need_no_other_name():
    settings = [{"algorithm": name, "environment": "E", "lr": lr} for name, lr in (("ppo", 1), ("dqn", 2))]
    assert labels_of(settings) == ["ppo", "dqn"]
    assert labels_of([*settings, settings[0] | {"lr": 3}]) == ["ppo, lr=1", "dqn", "ppo, lr=3"]


def test_a_seed_that_ended_keeps_its_last_value():
    long = [MetricPoint(100.0 * i, float(i), float(i)) for i in range(1, 11)]
    (group,) = group_curves([SeedCurve("a", {}, long), SeedCurve("b", {}, long[:5])])
    assert group.steps.mean[-1] == (10 + 5) / 2 and group.steps.low[-1] == 5


def test_smoothing_begins_with_the_first_value_and_keeps_a_constant():
    np.testing.assert_allclose(smooth_values(np.full(20, 3.0), 0.9), 3.0)
    np.testing.assert_allclose(smooth_values(np.array([1.0, 3.0]), 0.5), [1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_damaged_and_missing_values_are_passed_over(tmp_path):
    run = recorded(tmp_path, "a", [1.0, None, 5.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "env')
    (group,) = rollmill.plot(run).groups
    assert group.last.tolist() == [5.0] and group.steps.mean[100] == pytest.approx(3.0, abs=0.05)


def test_a_page_loads_nothing_runs_its_own_script_alone_and_escapes_names(tmp_path):
    run = recorded(tmp_path, "a", [1.0, 2.0], config={"text": "<script>alert(1)</script>"})
    other = recorded(tmp_path, "b", [1.0, 2.0], config={"text": '"onload="x'})
    rollmill.plot(run, other, output=tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "default-src 'none'" in page and "script-src 'sha256-" in page
    assert page.count("<script>") == 1 and 'onload="x' not in page
    assert not re.search(r'(src|href)="', page) and page.count('class="chart"') == 2
    rollmill.plot(run, output=tmp_path / "d.html", x="seconds")
    only = (tmp_path / "d.html").read_text()
    assert "seconds of training" in only and "environment steps" not in only


def test_a_png_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="it draws PNGs")
    run = recorded(tmp_path, "a", [1.0, 2.0])
    rollmill.plot(run, output=tmp_path / "c.png", x="steps")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_more_groups_than_colours_are_drawn_in_grey(tmp_path):
    runs = [recorded(tmp_path, str(i), [1.0, float(i)], config={"learning_rate": i}) for i in range(12)]
    curves = rollmill.plot(*runs, output=tmp_path / "c.html")
    assert curves.groups[0].label == "learning_rate=11"
    assert (tmp_path / "c.html").read_text().count('class="line faint"') == 2 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metric": "losses/nothing"},
            ("has-no-metric-there", "'losses/nothing'", "episode/return, losses/total"),
        ),
        ({"smoothing": 1.0}, ("smoothing-has-to-be-from",)),
        ({"baselines": {"rule": float("nan")}}, ("baseline-has-to-be-finite", "rule")),
        ({"x": "hours"}, ("x-has-to-be-or", "steps, seconds")),
        ({"output": "c.pdf"}, ("has-to-end-in-html",)),
        ({"output": "nowhere/c.html"}, ("cannot-be-written-there-is",)),
        ({"output": "there.html"}, ("exists-already-hint-force-force",)),
    ],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.html").touch()
    with raises(*message):
        rollmill.plot(recorded(tmp_path, "a", [1.0]), **options)


def test_directories_without_curves_are_refused(tmp_path):
    with raises("name-at-least-one-directory"):
        rollmill.plot()
    with pytest.raises(CheckpointError, match="is not the directory of a run"):
        rollmill.plot(tmp_path)
    whole, empty = recorded(tmp_path, "a", [1.0]), recorded(tmp_path, "b", [])
    with raises("has-no-metrics-yet-hint", "b"):
        rollmill.plot(whole, empty)
    for axis in ("env_steps", "seconds"):
        with raises("has-no-metric-there", axis):
            rollmill.plot(whole, metric=axis)


def test_a_sweep_stands_for_its_trials_and_names_those_without_values(tmp_path):
    from rollmill.sweeps.directory import SweepDirectory
    from rollmill.sweeps.search_space import Axis
    from rollmill.sweeps.spec import SweepSpec
    from rollmill.training.request import TrainingRequest

    axes = (Axis("learning-rate", (0.1, 0.2, 0.3)),)
    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1"), axes, 3, points=((0.1,), (0.2,), (0.3,)))
    sweep = SweepDirectory.create(tmp_path / "sweep", spec)
    recorded(sweep.root / "trials", "0", [1.0, 2.0], config={"learning_rate": 0.1})
    recorded(sweep.root / "trials", "1", [], config={"learning_rate": 0.2})
    curves = rollmill.plot(sweep.root)
    assert [group.runs for group in curves.groups] == [("0",)]
    assert [name.rpartition("/")[2] for name in curves.left_out] == ["2", "1"]


@pytest.mark.parametrize("text", ["$x_{", r"$\badcommand$", "_hidden", "\x1b[31m$"])
def test_words_of_others_are_no_formulas_in_a_png(text, tmp_path):
    pytest.importorskip("matplotlib", reason="it draws PNGs")
    runs = [recorded(tmp_path, name, [1.0, 2.0], config={"text": text + name}) for name in "ab"]
    rollmill.plot(*runs, output=tmp_path / "c.png", x="steps")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_words_of_others_are_printed_without_control_of_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        recorded(tmp_path, name, [1.0, 2.0], config={"text": f"\x1b]0;evil\x07{name}"})
    with pytest.raises(SystemExit):
        main(["plot", "a", "b"])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and r"text=\x1b]0;evil\x07a: episode/return 2" in shown.out


def test_the_command_writes_a_page_and_prints_the_last_values(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        recorded(tmp_path, f"run{seed}", [1.0, 10.0 + seed], seed=seed)
    with pytest.raises(SystemExit) as ended:
        main(["plot", "run0", "run1"])
    assert ended.value.code == 0 and (tmp_path / "curves.html").is_file()
    shown = capsys.readouterr().out
    assert "ppo on CartPole-v1: episode/return 10.5, 2 seeds from 10.0 to 11.0" in shown


def test_policies_that_are_not_trained_are_level_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = recorded(tmp_path, "run", [1.0, 10.0])
    curves = rollmill.plot(run, output="c.html", baselines={"random": 22.5})
    assert curves.baselines == {"random": 22.5} and "random: 22.5" in (tmp_path / "c.html").read_text()
    for words, code in ((["--baseline", "random=22.5", "--baseline", "a=b=3"], 0), (["--baseline", "random"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["plot", "run", *words])
        assert ended.value.code == code
    assert "a=b: 3" in (tmp_path / "curves.html").read_text()
    assert "--baseline random must be NAME=NUMBER" in capsys.readouterr().err


def test_groups_with_labels_that_are_cut_have_an_entry_each(tmp_path):
    # The labels of all three begin with the same hundred letters.
    sizes = " ".join(["1024"] * 30)
    runs = [
        recorded(tmp_path, f"run{n}", [n, n + 1], config={"sizes": f"{sizes} {n}", "gamma": 0.9}) for n in range(3)
    ]
    runs.append(recorded(tmp_path, "run9", [9, 9], config={"sizes": "8", "gamma": 0.9}))
    curves = rollmill.plot(*runs, output=tmp_path / "curves.html")
    page = (tmp_path / "curves.html").read_text()
    legend = re.search(r'<div class="legend">(.*?)</div>', page).group(1)
    assert len(curves.groups) == 4
    assert re.findall(r"var\(--(\w+)\)", legend) == ["c0", "c1", "c2", "c3"]
    assert ["[run2]" in legend, "[run1]" in legend, "[run0]" in legend, "[run9]" in legend] == [True] * 3 + [False]


def test_numbers_that_differ_late_tell_groups_apart():
    curves = [SeedCurve(name, {"gamma": gamma}, [MetricPoint(1, 1.0, 1.0)]) for name, gamma in RATES]
    assert sorted(group.label for group in group_curves(curves)) == ["gamma=0.99999901", "gamma=0.99999902"]


RATES = (("a", 0.99999901), ("b", 0.99999902))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("graph",), "graph=5 must be an object"),
        (("graph", "config"), "config=5 must be an object"),
        (("graph", "environment_options"), "environment_options=5 must be an object"),
        (("options",), "options=5 must be an object"),
    ],
)
def test_a_part_of_a_configuration_that_is_no_object_is_named(tmp_path, path, message):
    run = recorded(tmp_path, "a", [1.0])
    config = json.loads((run / "config.json").read_text())
    (config if len(path) == 1 else config[path[0]])[path[-1]] = 5
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        rollmill.plot(run)


def test_seeds_are_those_of_the_metrics_however_many_a_configuration_names(tmp_path):
    run = recorded(tmp_path, "a", [[0.0, 4.0], [1.0, 7.0]], seed=3, num_seeds=2)
    config = json.loads((run / "config.json").read_text())
    config["options"]["num_seeds"] = 2**60
    (run / "config.json").write_text(json.dumps(config))
    (group,) = rollmill.plot(run).groups
    assert group.runs == ("a, seed 3", "a, seed 4") and group.last.tolist() == [1.0, 7.0]


def test_a_loop_of_links_and_a_line_without_an_end_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="loop"):
        rollmill.plot(tmp_path / "loop")
    run = recorded(tmp_path, "a", [1.0])
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(2**33)  # takes no space on the disk
    with raises("cannot-be-read-line-has", "metrics.jsonl", "1,048,576"):
        rollmill.plot(run)


def test_steps_beyond_all_numbers_are_passed_over(tmp_path):
    run = recorded(tmp_path, "a", [1.0, 2.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 1' + "0" * 400 + ', "seconds": 2.0, "episode/return": 9.0}\n')
    (group,) = rollmill.plot(run).groups
    assert group.last.tolist() == [2.0]
