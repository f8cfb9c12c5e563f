"""`rollmill board`: rows that follow the folder, curves, details, and a server for this user alone."""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import webbrowser
from functools import partial
from html import unescape
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import pytest

from recorded_runs import of_opponents, recorded
from registries import restored
from rollmill.board import page as page_module
from rollmill.board.contents import FolderContents
from rollmill.board.responses import PAGE_POLICY, Answers
from rollmill.board.server import BoardServer
from rollmill.cli import board as command
from rollmill.cli.evaluate import Evaluate
from rollmill.cli.parsing import parse
from rollmill.cli.plot import Plot
from rollmill.cli.profile import Profiling
from rollmill.cli.render import Render
from rollmill.cli.requests import MERGED, parse_training
from rollmill.cli.resume import Resume
from rollmill.cli.sweep import _parse_resume
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.pages.page import asset
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.search_space import listed_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.request import TrainingRequest
from wordings import raises


@pytest.fixture
def folder(tmp_path):
    recorded(tmp_path / "a", summary={"status": "finished"})
    recorded(tmp_path / "deep/b", rate=0.01)
    request = TrainingRequest("ppo", "CartPole-v1", {"total_timesteps": 512})
    spec = SweepSpec(request, (listed_axis("gamma", [0.9, 0.99]),), 2, ((0.9,), (0.99,)))
    sweep = SweepDirectory.create(tmp_path / "s", spec)
    recorded(sweep.run(sweep.trials()[0]).root, summary={"status": "finished"})
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    (tmp_path / "a/profile").mkdir()
    (tmp_path / "a/profile/profile.html").write_text("<script>fetch('/rows')</script>")
    return tmp_path


@pytest.fixture
def contents(folder, monkeypatch):
    monkeypatch.setattr("rollmill.board.contents.MIN_SECONDS", 0.0)
    monkeypatch.setattr("rollmill.board.contents.MAX_SHARE", 1.0)
    return FolderContents(folder)


def keys(changes):
    return {item.key: item.parent for item in changes.items}


def test_rows_are_sent_once_and_again_after_a_change(folder, contents):
    first = contents.changes()
    trial = next(key for key, parent in keys(first).items() if parent == "s")
    assert keys(first) == {"a": None, "deep/b": None, "s": None, trial: "s"}
    assert first.varying == ("learning_rate",) and first.files == ("a.gif",)
    assert contents.changes(first.version).items == []
    with open(folder / "deep/b/metrics.jsonl", "a") as file:
        file.write('"}\n{"iteration": 4, "env_steps": 400, "episode/return": 7.5}\n')
    shutil.rmtree(folder / "a")
    second = contents.changes(first.version)
    changed = {item.key: item.entry.mean_return for item in second.items}
    assert changed["deep/b"] == 7.5 and second.gone == ["a"] and contents.item("a") is None


def test_an_unchanged_run_is_not_read_again(contents, monkeypatch):
    contents.changes()
    monkeypatch.setattr("rollmill.board.contents.read_run", None)
    monkeypatch.setattr("rollmill.board.contents.read_sweep", None)
    assert contents.changes().version == 1


def body(answer):
    return json.loads(answer.body)


def test_runs_are_compared_by_curves_and_settings(folder):
    answers = Answers(folder)
    answers.read()
    found = body(answers.answer("/curves", {"run": ["a", "deep/b", "none"]}))
    assert "learning_rate</td><td>0.001</td><td>0.01</td>" in found["html"]
    assert found["html"].count("<path") == 2 and "episode/return" in found["metrics"]
    assert body(answers.answer("/curves", {"run": ["a"], "metric": ["x<y"]}))["html"].count("x&lt;y") == 1
    assert body(answers.answer("/sparks", {"run": ["a"]})) == {"a": [1.0, 2.0, 3.0]}


def test_each_kind_of_agents_has_its_return(tmp_path):
    recorded(tmp_path / "game", more=of_opponents)
    answers = Answers(tmp_path)
    answers.read()
    (row,) = body(answers.answer("/rows", {}))["rows"]
    assert row["returns"] == {"guard": 0.75, "thief": -0.75} and row["shown"] == "guard 0.750, thief -0.750"
    assert body(answers.answer("/sparks", {"run": ["game"]})) == {"game": [0.5, 0.75]}
    shown = body(answers.answer("/details", {"run": ["game"]}))["html"]
    assert "mean return of thief in the latest episodes" in shown
    assert "mean return of the latest episodes" not in shown
    assert shown.index("returns/guard") < shown.index("steps_per_second")
    compared = body(answers.answer("/curves", {"run": ["game"], "metric": ["returns/thief"]}))
    assert "guard 0.750, thief -0.750</td>" in compared["html"] and compared["html"].count("<path") == 1


def test_numbers_of_a_damaged_run_hide_no_other(folder):
    """Beyond a float's range once they are rounded or multiplied."""
    recorded(folder / "c", num_seeds=10**17)
    with open(folder / "c/metrics.jsonl", "a") as file:
        file.write('"}\n{"env_steps": 400, "episode/return": 1.7976e308}\n{"env_steps": 1e300}\n')
    answers = Answers(folder)
    rows = {row["key"]: row for row in body(answers.answer("/rows", {}))["rows"]}
    assert rows["a"]["return"] == 12.5 and rows["c"]["return"] is None
    assert body(answers.answer("/sparks", {"run": ["a", "c"]}))["a"] == [1.0, 2.0, 3.0]


def test_a_request_that_fails_says_why(folder, monkeypatch):
    answers = Answers(folder)
    monkeypatch.setattr(answers._contents, "changes", lambda since: 1 / 0)
    answer = answers.answer("/rows", {})
    assert (answer.status, answer.body) == (500, b"/rows failed: ZeroDivisionError: division by zero\n")


def test_seeds_of_one_configuration_become_one_line(folder):
    recorded(folder / "c", summary={"status": "finished"})
    answers = Answers(folder)
    answers.read()
    query = {"run": ["a", "c", "deep/b"], "group": ["1"]}
    assert "learning_rate=0.001 (2 seeds)" in body(answers.answer("/curves", query))["html"]


def test_details_link_pages_and_pictures_and_escape_names(folder):
    name = "<img src=x onerror=alert(1)>"
    recorded(folder / name, algorithm="<b>")
    answers = Answers(folder)
    answers.read()
    html = body(answers.answer("/details", {"run": ["a"]}))["html"]
    assert "file?path=a%2Fprofile%2Fprofile.html" in html and '<img src="file?path=a.gif"' in html
    html = body(answers.answer("/details", {"run": [name]}))["html"]
    assert "<img" not in html and "<b>" not in html.replace('<div class="tile"><b>', "")


RACING = """
import rollmill

rollmill.register("Race-v0", lambda: rollmill.make("CartPole-v1"))
rollmill.register_algorithm("own-ppo", lambda env, config: rollmill.ppo(env, config), rollmill.PPOConfig)
"""
PARSERS = {
    "resume": partial(parse, Resume, prog="rollmill resume"),
    "evaluate": partial(parse, Evaluate, prog="rollmill evaluate"),
    "render": partial(parse, Render, prog="rollmill render"),
    "plot": partial(parse, Plot, prog="rollmill plot"),
    "profile": partial(
        parse_training, command="profile", more=("profiling", Annotated[Profiling, MERGED], Profiling())
    ),
    "sweep": _parse_resume,
}


def test_commands_for_own_algorithms_find_their_modules_and_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("racing.py").write_text(RACING)
    run = recorded(Path("runs/a"), algorithm="own-ppo", environment="Race-v0", summary={"status": "stopped"})
    config = run.read_config()
    options = {"laps": 3, "track": "wet", "name": "3"}
    config["graph"]["environment_options"] = options
    run.write_config({**config, "imports": ["racing"]})
    request = TrainingRequest("own-ppo", "Race-v0", imports=("racing",))
    SweepDirectory.create(Path("runs/s"), SweepSpec(request, (listed_axis("seed", [0, 1]),), 2, ((0,), (1,))))
    answers = Answers(Path("runs"))
    answers.read()
    own = "rollmill {} --import racing.py"
    of_run, of_sweep = offered(answers, "a"), offered(answers, "s")
    assert of_run == [
        *(own.format(f"{name} runs/a") for name in ("resume", "evaluate", "render")),
        "rollmill plot runs/a",
        own.format(
            "profile own-ppo Race-v0 --env-option laps=3 --env-option track=wet --env-option 'name=\"3\"' "
            "--output runs/a/profile"
        ),
    ]
    assert of_sweep == [own.format("sweep --resume runs/s"), "rollmill plot runs/s"]
    assert "racing" not in sys.modules  # the board runs no code of a run
    monkeypatch.syspath_prepend(tmp_path)
    with restored(ALGORITHMS, ENVIRONMENTS):
        for line in (*of_run, *of_sweep):
            name, *words = shlex.split(line.partition("rollmill ")[2])
            parsed = PARSERS[name](words)
            if name == "profile":
                assert parsed.request.environment_options == options
    del sys.modules["racing"]


def offered(answers, key):
    """The commands in the details of a run or sweep."""
    html = body(answers.answer("/details", {"run": [key]}))["html"]
    return [unescape(line) for line in re.findall("<li><code>(.*?)</code>", html)]


def test_a_damaged_sweep_has_details(folder):
    answers = Answers(folder)
    answers.read()
    (folder / "s/sweep.json").write_text("{")
    assert offered(answers, "s") == [f"rollmill plot {folder}/s"]


def test_curves_are_named_by_their_seeds(tmp_path):
    """Not by their number: the seeds of `recorded` are 7 and 8."""
    recorded(tmp_path / "a", num_seeds=1)
    recorded(tmp_path / "b", more=lambda line: {f"episode/return_seed{seed}": line + seed for seed in (7, 8)})
    answers = Answers(tmp_path)
    answers.read()
    html = body(answers.answer("/details", {"run": ["a"]}))["html"]
    assert set(labels(html)) == {"seed 7"}
    html = body(answers.answer("/details", {"run": ["b"]}))["html"]
    assert set(labels(html)) == {"seed 7", "seed 8", "all seeds"}
    html = body(answers.answer("/curves", {"run": ["a", "b"]}))["html"]
    assert {"a", "b, seed 7", "b, seed 8"} <= set(labels(html))


def labels(html):
    """The names of the lines in figures."""
    return re.findall(r'"label": ?"(.*?)"', unescape(html))


def test_files_below_the_folder_are_shown_and_no_link_is_followed(folder, tmp_path_factory):
    secret = tmp_path_factory.mktemp("outside") / "secret.html"
    secret.write_text("secret")
    os.symlink(secret, folder / "a/link.html")
    os.symlink(secret.parent, folder / "out")
    answers = Answers(folder)
    shown = answers.answer("/file", {"path": ["a/profile/profile.html"]})
    assert (shown.status, shown.policy) == (200, PAGE_POLICY) and "sandbox" in PAGE_POLICY
    shown.body.close()
    outside = os.path.relpath(secret, folder)
    refused = ["a/link.html", "out/secret.html", outside, str(secret), "a/.lock", "a/checkpoints", "", "none.html"]
    assert [answers.answer("/file", {"path": [path]}).status for path in refused] == [404] * len(refused)


@pytest.fixture
def server(folder):
    with BoardServer(folder) as server, server.serving():
        yield server


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_the_page_opens_by_its_token_and_data_by_the_cookie(server):
    address = urlsplit(server.url)
    status, headers, text = get(server, f"{address.path}?{address.query}")
    assert status == 200 and "connect-src 'self'" in text and server.token not in text
    cookie, _, more = headers["Set-Cookie"].partition(";")
    assert "HttpOnly" in more and "SameSite=Strict" in more
    status, _, rows = get(server, "/rows?since=0", Cookie=f"other=1; {cookie}")
    assert status == 200 and len(json.loads(rows)["rows"]) == 4
    assert get(server, "/none", Cookie=cookie)[0] == 404
    assert get(server, f"/file?path={quote('a.gif')}", Cookie=cookie)[2] == "GIF89a"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/?token=wrong", {}),
        ("/rows?since=0", {"Cookie": "rollmill-00000000=wrong"}),
        ("/?token={token}", {"Host": "attacker.example"}),
        ("/?token={token}", {"Host": "127.0.0.1.attacker.example:80"}),
        ("/rows?token={token}", {}),
    ],
)
def test_strangers_are_refused(server, path, headers):
    status, _, text = get(server, path.format(token=server.token), **headers)
    assert status == 403 and "CartPole" not in text


def test_a_tunnel_may_end_at_another_port(server):
    assert get(server, urlsplit(server.url).path + f"?token={server.token}", Host="localhost:9")[0] == 200


def test_a_port_in_use_is_named(server, folder):
    with raises("port-cannot-be-used", f"--port {server.server_port}"):
        BoardServer(folder, port=server.server_port)


def test_the_page_is_named_after_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = page_module.board_page(Path("runs"))
    assert f"<h1>Runs in {tmp_path}/runs</h1>" in page and "<title>Rollmill board: runs</title>" in page


def test_the_script_is_valid(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    script = tmp_path / "board.js"
    script.write_text(asset(page_module.__name__, "board.js"))
    subprocess.run([node, "--check", str(script)], check=True, timeout=60)


def test_the_words_of_the_browser_have_no_token(folder, monkeypatch, capsys):
    opened = []

    def browser(url):
        path = Path(urlsplit(url).path)
        opened.append((url, path.read_text(), path.stat().st_mode & 0o077 & path.parent.stat().st_mode))
        os.kill(os.getpid(), signal.SIGINT)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    assert command.run([str(folder), "--open"]) == 130
    ((url, page, mode),) = opened
    address = capsys.readouterr().out.split()[-1]
    token = address.partition("token=")[2]
    assert token and token not in url and f"url={address}" in page and not mode
    assert not Path(urlsplit(url).path).exists()


def test_a_browser_of_snap_gets_a_page_that_it_can_read(tmp_path, monkeypatch):
    """It has a /tmp of its own, and reads no folder with a dot."""
    home, snaps = tmp_path / "home", tmp_path / "snap"
    for folder in (home, snaps):
        folder.mkdir()
    (snaps / "firefox").touch()
    monkeypatch.setattr(Path, "home", lambda: home)
    with command.leading_page("http://127.0.0.1/") as page:
        assert not page.is_relative_to(home)
    monkeypatch.setattr(command, "SNAPS", snaps)
    with command.leading_page("http://127.0.0.1/") as page:
        assert page.is_relative_to(home) and not page.parent.name.startswith(".")
    assert not list(home.iterdir())
    home.rmdir()
    with command.leading_page("http://127.0.0.1/") as page:
        assert page.exists()


def test_ctrl_c_ends_the_command(folder):
    words = [sys.executable, "-m", "rollmill", "board", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.home())
    assert process.stdout is not None
    assert "http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
