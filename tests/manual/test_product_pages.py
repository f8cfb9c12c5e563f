"""The pages that commands write or serve, in a real browser at two widths and in two themes."""

import json
import math
from itertools import product

import pytest

from browser import BROWSER, keep_picture, open_browser
from profiling.by_hand import process, profile
from recorded_runs import recorded
from rollmill.board.server import BoardServer
from rollmill.plotting.curves import plot
from rollmill.profiler.advice import with_advice
from rollmill.profiler.report.comparison import compare, comparison_page
from rollmill.profiler.report.html import profile_page
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.report import write_report
from rollmill.sweeps.search_space import listed_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.request import TrainingRequest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
WIDTHS, THEMES = (1280, 400), ("light", "dark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs, a sweep with its report, curves, and profiles."""
    root = tmp_path_factory.mktemp("pages")
    recorded(root / "first", summary={"status": "finished"}, lines=30)
    recorded(root / "deep/second", rate=0.01, lines=20, algorithm="impala")
    recorded(root / "a-run-with-a-long-name-of-many-words-2026-11-29", rate=0.1, summary={"status": "failed"})
    sweep = made_sweep(root / "sweep")
    write_report(sweep, sweep.rows("final_return"), "final_return")
    plot(root / "sweep", output=root / "curves.html", baselines={"random": 22.5}, x="both")
    actors = profile(processes=[process("actor/0"), process("long-name-" * 12), process()])
    (root / "first/profile").mkdir()
    (root / "first/profile/profile.html").write_text(profile_page(with_advice(profile())))
    (root / "processes.html").write_text(profile_page(with_advice(actors)))
    (root / "comparison.html").write_text(comparison_page(compare(profile(), actors)))
    return root


def made_sweep(root):
    """A sweep over two options and three seeds, whose curves rise and waver."""
    points = tuple(product((1e-3, 2.5e-3, 1e-2), ("tanh", "relu"), range(3)))
    axes = (
        listed_axis("learning-rate", sorted({point[0] for point in points})),
        listed_axis("network.activation", ["tanh", "relu"]),
        listed_axis("seed", [0, 1, 2]),
    )
    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1", {"total_timesteps": 40_000}), axes, 18, points)
    sweep = SweepDirectory.create(root, spec)
    for number, trial in enumerate(sweep.trials()):
        height = 100 + 20 * number
        run = recorded(sweep.run(trial).root, num_seeds=1, rate=points[number][0])
        steps = [
            {
                "iteration": n,
                "env_steps": 1000 * n,
                "seconds": n / 3,
                "episode/return": height * (1 - math.exp(-n / 12)) + 12 * math.sin(n * (1 + number % 3)),
            }
            for n in range(1, 41)
        ]
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in steps))
        run.write_summary({"status": "finished", "final_return": float(height), "env_steps": 40_000})
    return sweep


def check(seen, *, origin):
    """Fails if a page says something on the console, asks others, or does not fit."""
    assert [one for one in seen.requests if not one.startswith(origin)] == []
    assert (seen.console, seen.failed, seen.wide) == ([], [], [])
    assert seen.scroll <= seen.width


@pytest.mark.parametrize(
    "name", ["sweep/report.html", "curves.html", "first/profile/profile.html", "processes.html", "comparison.html"]
)
def test_a_page_that_a_command_writes(folder, name, tmp_path):
    address = (folder / name).as_uri()
    with open_browser(tmp_path) as browser:
        for width, theme in product(WIDTHS, THEMES):
            seen = browser.look(address, width=width, theme=theme, height=2000)
            check(seen, origin=address)
            keep_picture(browser, f"{name.replace('/', '-')}-{width}-{theme}.png")


def test_the_board_with_chosen_runs_and_open_details(folder, tmp_path):
    with BoardServer(folder) as server, server.serving(), open_browser(tmp_path) as browser:
        origin = f"http://127.0.0.1:{server.server_port}/"
        for width, theme in product(WIDTHS, THEMES):
            check(browser.look(server.url, width=width, theme=theme, height=2400, wait=1.0), origin=origin)
            browser.value("document.querySelectorAll('#runs td input').forEach((one) => one.click())")
            browser.value(
                "[...document.querySelectorAll('#runs button.open')].find((b) => b.textContent == 'first').click()"
            )
            browser.rest(1.0)
            seen = browser.seen()
            check(seen, origin=origin)
            assert "learning_rate" in seen.text and "settings" in seen.text
            keep_picture(browser, f"board-{width}-{theme}.png")
