"""The pages on the algorithms: their form, their tables, their examples, and the metrics that they explain."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.algorithms import GAMES
from rollmill.cli import train as train_command
from rollmill.dataflow import init_state, iterate
from rollmill.record.metrics import read_metrics
from rollmill.runs.algorithms import BUILTIN
from rollmill.training import request
from rollmill.training.recorder import HIDDEN
from rollmill.workers.replica.context import lag_metrics

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/algorithms"
SHARED = ROOT / "docs/metrics.md"
ON_ANOTHER_PAGE = {"ippo": "mappo"}
NAMES = [name for name in BUILTIN if name not in ON_ANOTHER_PAGE]
HEADINGS = ["Spaces", "Example", "Hyperparameters", "Metrics", "Results", "Departures from the paper"]
OPEN_ENDED = {"SET": r"\w+", "KIND": r"\w+", "seed0": r"seed\d+"}
"""Parts of metrics' names that stand for others."""

FOR_SMALL_PROGRAMS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
"""Settings of tests in whose place a whole training needs JAX's own."""

SHORTENED = {"rsac": ("100000", "10000")}
"""Numbers of steps of examples that would train for minutes, and those with which the tests run them."""

TINY = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "network": rollmill.NetworkConfig(hidden_sizes=(8,))}
REPLAY = {"buffer_size": 200, "batch_size": 8, "learning_starts": 32}
TRAININGS = {
    "ppo": ("CartPole-v1", {}),
    "a3c": ("CartPole-v1", {}),
    "a2c": ("CartPole-v1", {}),
    "impala": ("CartPole-v1", {}),
    "dqn": ("CartPole-v1", {**REPLAY, "value_distribution": "c51"}),
    "pqn": ("CartPole-v1", {"num_minibatches": 2}),
    "r2d2": ("CartPole-v1", {**REPLAY, "sequence_length": 16, "network": rollmill.NetworkConfig(torso="gru")}),
    "sac": ("Pendulum-v1", REPLAY),
    "rsac": ("Pendulum-v1", {**REPLAY, "sequence_length": 16, "network": rollmill.NetworkConfig(torso="gru")}),
    "td3": ("Pendulum-v1", REPLAY),
    "ddpg": ("Pendulum-v1", REPLAY),
    "alphazero": ("TicTacToe-v0", {"num_simulations": 2}),
    "mappo": ("TagGridWorld-Small-v0", {}),
    "ippo": ("TagGridWorld-Small-v0", {}),
    "vdn": ("TwoStepGame-v0", REPLAY),
    "qmix": ("TwoStepGame-v0", REPLAY),
}


def page_of(name):
    return PAGES / f"{ON_ANOTHER_PAGE.get(name, name)}.md"


def section(name, heading):
    return re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page_of(name).read_text(), re.M | re.S)[0]


def blocks(name):
    """The command and the Python code of a page's example."""
    example = section(name, "Example")
    command, code = (re.findall(rf"^```{kind}\n(.*?)^```", example, re.M | re.S)[0] for kind in ("bash", "python"))
    return shlex.split(command.replace("\\\n", " ")), code


@cache
def tables():
    """The script that writes the tables."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return import_module("tables")
    finally:
        sys.path.pop(0)


# --- form and tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILTIN)
def test_every_algorithm_has_a_page_that_the_index_and_the_navigation_name(name):
    page = page_of(name)
    assert re.search(rf"\b{name}\b", page.read_text().partition("\n")[0], re.I)
    assert f"]({page.name})" in (PAGES / "index.md").read_text()
    assert f"algorithms/{page.name}" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_pages_have_the_same_headings(page):
    if page.stem != "index":
        assert re.findall(r"^## (.*)$", page.read_text(), re.M) == HEADINGS


@pytest.mark.parametrize("name", BUILTIN)
def test_every_field_of_a_configuration_is_explained(name):
    config = BUILTIN[name].config
    meanings = tables().docstrings_of(config)
    assert list(meanings) == [field.name for field in dataclasses.fields(config)]
    rows = re.findall(r"^\| `(\w+)` \|", section(name, "Hyperparameters"), re.M)
    assert rows == list(meanings)


# --- metrics ------------------------------------------------------------------------------------------


def names_in(text):
    """The names in the first column of tables of metrics."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    return {metric for cell in cells for metric in re.findall(r"`([^`]+)`", cell)}


def pattern(metric):
    written = re.escape(metric)
    for part, others in OPEN_ENDED.items():
        written = re.sub(rf"{part}$", lambda _, others=others: others, written)
    return re.compile(written)


def is_explained(metric, names):
    return any(pattern(name).fullmatch(metric) for name in names)


def graph_of(name):
    environment, options = TRAININGS[name]
    return getattr(rollmill, name)(environment, **{**TINY, **options})


@cache
def lag_metrics_an_iteration(name):
    """The names of all that an iteration computes for the log; nothing is compiled."""
    graph = graph_of(name)
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    state = jax.eval_shape(partial(init_state, graph), jax.random.key(0), index)
    computed = jax.eval_shape(partial(iterate, graph), state)[1]
    return {metric for metric in computed if metric.startswith(GAMES) or not metric.startswith(HIDDEN)}


@pytest.fixture(scope="module")
def added_by_the_recorder(tmp_path_factory):
    """The metrics of a line that no graph computes."""
    run = rollmill.train(
        graph_of("ppo"), run_dir=tmp_path_factory.mktemp("pages") / "run", quiet=True, tensorboard=False
    )
    line = read_metrics(run.directory / "metrics.jsonl")[-1]
    assert set(line) > lag_metrics_an_iteration("ppo")
    return set(line) - lag_metrics_an_iteration("ppo")


@pytest.mark.slow
def test_what_every_run_logs_is_explained(added_by_the_recorder):
    shared = names_in(SHARED.read_text())
    logged = {*added_by_the_recorder, *lag_metrics([1]), "episode/return_seed1"}
    assert {metric for metric in logged if not is_explained(metric, shared)} == set()


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.slow_beyond(3)
def test_what_an_algorithm_logs_is_explained_on_its_page_or_the_shared_one(name):
    logged, own = lag_metrics_an_iteration(name), names_in(section(name, "Metrics"))
    unexplained = {metric for metric in logged if not is_explained(metric, own | names_in(SHARED.read_text()))}
    assert unexplained == set()
    assert {metric for metric in own if not any(pattern(metric).fullmatch(each) for each in logged)} == set()


# --- examples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_example_trains_the_same_by_the_command_and_in_python(name, monkeypatch):
    (_, _, *command), code = blocks(name)
    started = []

    def train(graph, options=None, **given):
        started.append((graph.settings, options if given == {} else rollmill.RunOptions(**given)))
        return rollmill.Run(Path(), {"final_return": 0.0}, 0)

    monkeypatch.setattr(rollmill, "train", train)
    exec(code, {})
    monkeypatch.setattr(request, "prepare_devices", lambda *_, **__: None)
    monkeypatch.setattr(request, "train", lambda graph, options, **_: train(graph, options))
    monkeypatch.setattr(train_command, "report", lambda _: 0)
    assert train_command.run(command) == 0
    in_python, by_the_command = started
    assert in_python == by_the_command


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_example_trains(name, tmp_path):
    (_, *command), _ = blocks(name)
    if name in SHORTENED:
        steps, fewer = SHORTENED[name]
        command[command.index(steps)] = fewer
    command = [sys.executable, "-m", "rollmill", *command, "--quiet"]
    optimised = {key: value for key, value in os.environ.items() if key not in FOR_SMALL_PROGRAMS}
    done = subprocess.run(command, cwd=tmp_path, env=optimised, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final return" in done.stdout
